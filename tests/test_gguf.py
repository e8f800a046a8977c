"""A GGUF file is the same model as the safetensors checkpoint with the values that gguf-py reads from it, bit for bit."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import torchtpu_rs
from tests import checkpoints, gguf_files
from tests.gguf_files import Kind

LIKE = torch.zeros(1)
PROMPT = checkpoints.prompt(20)
FORCED = checkpoints.prompt(6, seed=8)

WIDE: dict[str, Any] = checkpoints.DENSE | {"hidden_size": 256, "intermediate_size": 256}
"""Rows that are whole blocks of 256, in most matrices."""

KERNELS = {
    Kind.Q4_0: ("int4", 2),
    Kind.Q5_0: ("int8", 1.3),
    Kind.Q8_0: ("int8", 1.3),
    Kind.Q4_K: ("int4", 2),
    Kind.Q5_K: ("int5", 1.8),
    Kind.Q6_K: ("int6", 1.6),
}
"""Types that fast mode multiplies as they are stored: the format's name, and how much smaller weights are at least."""

QUANTIZED = list(KERNELS)


def engine(checkpoint: Path | list[Path], **options: Any) -> torchtpu_rs.Engine:
    return torchtpu_rs.Engine(checkpoint, LIKE, 64, **options)


def logits(checkpoint: Path | list[Path], **options: Any) -> torch.Tensor:
    return engine(checkpoint, **options).logits(PROMPT, FORCED, all=True)


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return checkpoints.make(tmp_path_factory.mktemp("wide"), WIDE)


@pytest.mark.parametrize("settings", ["DENSE", "K_EQ_V", "ONE_KV_HEAD", "NO_GROUPS", "EXPERTS"])
def test_every_kind_of_layer_is_the_same_from_a_gguf_file(tmp_path: Path, settings: str) -> None:
    folder = checkpoints.make(tmp_path / "folder", getattr(checkpoints, settings))
    file = gguf_files.convert(folder, tmp_path / "model.gguf")
    assert torch.equal(logits(file), logits(folder))
    info, wanted = engine(file).info(), engine(folder).info()
    for key in ("layout", "dtype", "vocab_size", "weight_bytes", "cache_bytes"):
        assert info[key] == wanted[key]


@pytest.mark.parametrize("kind", [Kind.F32, Kind.F16, Kind.BF16, *QUANTIZED], ids=lambda k: k.name)
def test_every_type_gives_the_values_that_gguf_py_reads(
    wide: Path, tmp_path: Path, kind: Kind
) -> None:
    truth = tmp_path / "truth"
    file = gguf_files.convert(wide, tmp_path / "model.gguf", kind, truth=truth)
    assert torch.equal(logits(file), logits(truth))
    if kind not in QUANTIZED:
        fast = {"arithmetic": "fast"}
        assert torch.equal(logits(file, **fast), logits(truth, **fast))


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_other_element_types_are_rounded_to_once(wide: Path, tmp_path: Path, dtype: str) -> None:
    folder = tmp_path / "float32"
    shutil.copytree(wide, folder)
    weights = load_file(wide / "model.safetensors")
    save_file({name: w.float() for name, w in weights.items()}, folder / "model.safetensors")
    truth = tmp_path / "truth"
    file = gguf_files.convert(folder, tmp_path / "model.gguf", Kind.Q6_K, truth=truth)
    assert torch.equal(logits(file, dtype=dtype), logits(truth, dtype=dtype))


@pytest.mark.parametrize("kind", KERNELS, ids=lambda k: k.name)
def test_four_bits_to_eight_are_multiplied_as_they_are_stored(
    wide: Path, tmp_path: Path, kind: Kind
) -> None:
    truth = tmp_path / "truth"
    file = gguf_files.convert(wide, tmp_path / "model.gguf", kind, truth=truth)
    fast = engine(file, arithmetic="auto")
    name, smaller = KERNELS[kind]
    assert fast.info()["weight_format"] == name
    assert fast.info()["weight_bytes"] < engine(file).info()["weight_bytes"] / smaller
    # The factors are kept whole, so that the one rounding that is left is that of the activations.
    weights = load_file(truth / "model.safetensors")
    whole = {name: w.float() for name, w in weights.items()}
    save_file(whole, truth / "model.safetensors")
    exact = logits(truth, dtype="float32").double()
    found = fast.logits(PROMPT, FORCED, all=True).double()
    assert 0 < ((found - exact).square().mean() / exact.square().mean()).item() < 0.001


def test_info_tells_types_and_bytes_in_the_file_and_as_they_are_kept(
    dense: Path, wide: Path, tmp_path: Path
) -> None:
    def bytes_of(shape: tuple[int, ...]) -> int:
        return shape[0] * shape[1] // 256 * 144

    file = gguf_files.convert(wide, tmp_path / "model.gguf", Kind.Q4_K)
    shapes = [w.shape for w in load_file(wide / "model.safetensors").values() if w.ndim == 2]
    info = engine(file).info()
    assert set(info["stored_bytes"]) == {"Q4_K", "F32"}
    assert info["stored_bytes"]["Q4_K"] == sum(bytes_of(s) for s in shapes if s[1] % 256 == 0)
    assert (info["weight_format"], info["weight_bytes"]) == (
        "bfloat16",
        engine(wide).info()["weight_bytes"],
    )
    fast = engine(file, arithmetic="fast").info()
    assert fast["stored_bytes"] == info["stored_bytes"]
    assert (fast["weight_format"], fast["weight_bytes"] < info["weight_bytes"] / 2) == (
        "int4",
        True,
    )
    assert engine(dense).info()["stored_bytes"] == {"BF16": engine(dense).info()["weight_bytes"]}


def test_a_folder_with_one_file_or_one_set_stands_for_it(dense: Path, tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    gguf_files.convert(dense, folder / "model.gguf")
    (folder / "mmproj-model.gguf").write_text("a projector, of no concern here")
    assert torch.equal(logits(folder), logits(dense))


def test_any_file_of_a_set_stands_for_all_of_them(dense: Path, tmp_path: Path) -> None:
    keys, tensors, _ = gguf_files.parts_of(dense)
    names = sorted(tensors)
    thirds = [names[i::3] for i in range(3)]
    files = [tmp_path / f"model-0000{i + 1}-of-00003.gguf" for i in range(3)]
    for number, (file, own) in enumerate(zip(files, thirds, strict=True)):
        split = {"split.no": number, "split.count": 3, "split.tensors.count": len(names)}
        gguf_files.write(
            file, (keys if number == 0 else {}) | split, {name: tensors[name] for name in own}
        )
    wanted = logits(dense)
    for path in (*files, tmp_path):
        assert torch.equal(logits(path), wanted)
        assert torchtpu_rs.gguf_metadata(path)["gemma4.block_count"] == 9


@pytest.mark.parametrize("arithmetic", ["compiled", "int8"])
def test_what_compiled_programs_compute_with_is_made_of_the_same_values(
    wide: Path, tmp_path: Path, arithmetic: str
) -> None:
    truth = tmp_path / "truth"
    file = gguf_files.convert(wide, tmp_path / "model.gguf", Kind.Q5_K, truth=truth)
    options = {"arithmetic": arithmetic, "prefill_chunk": 8}
    assert torch.equal(
        engine(file, **options).logits(PROMPT), engine(truth, **options).logits(PROMPT)
    )


def test_a_tensor_is_taken_from_the_first_that_has_it(dense: Path, tmp_path: Path) -> None:
    file = gguf_files.convert(dense, tmp_path / "model.gguf")
    name = "model.embed_tokens.weight"
    table = load_file(dense / "model.safetensors")[name].flip(0).contiguous()
    first = tmp_path / "first"
    first.mkdir()
    save_file({name: table}, first / "tables.safetensors")
    both = tmp_path / "both"
    shutil.copytree(dense, both)
    save_file(load_file(dense / "model.safetensors") | {name: table}, both / "model.safetensors")
    assert torch.equal(logits([first, file]), logits(both))
    assert torch.equal(logits([file, first]), logits(dense))


def test_answers_end_at_the_ids_that_the_metadata_names(dense: Path, tmp_path: Path) -> None:
    file = gguf_files.convert(dense, tmp_path / "model.gguf")
    assert engine(file).info()["eos_token_ids"] == [1, 106]


def test_the_element_type_is_bfloat16_unless_asked_for(dense: Path, tmp_path: Path) -> None:
    file = gguf_files.convert(dense, tmp_path / "model.gguf", Kind.F32)
    assert engine(file).info()["dtype"] == "bfloat16"
    assert engine(file, dtype="float32").info()["dtype"] == "float32"
