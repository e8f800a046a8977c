"""Checkpoints written by `quantize` are read by transformers with compressed-tensors and by the engine, with the same bits."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from compressed_tensors.compressors.pack_quantized.base import unpack_from_int32
from safetensors.torch import load_file, save_file
from transformers import Gemma3ForCausalLM, Gemma3TextConfig

import torchtpu_rs
from bench.exact import equal_bits, load_transformers, run_transformers
from quantize import QuantizeError, convert
from tests import checkpoints

STEPS = 8
LIKE = torch.zeros(1)

GEMMA3: dict[str, Any] = {
    "vocab_size": checkpoints.VOCAB,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "query_pre_attn_scalar": 32,
    "sliding_window": 8,
    "layer_types": ["sliding_attention"] * 5 + ["full_attention"],
    "max_position_embeddings": 512,
    "eos_token_id": 1,
}


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    return {
        name: tensor
        for file in sorted(folder.glob("*.safetensors"))
        for name, tensor in load_file(file).items()
    }


def unpacked(folder: Path, dtype: torch.dtype = torch.bfloat16) -> dict[str, torch.Tensor]:
    """All tensors, the packed ones as compressed-tensors unpacks them."""
    found = tensors(folder)
    config = json.loads((folder / "config.json").read_text())["quantization_config"]
    bits = config["config_groups"]["group_0"]["weights"]["num_bits"]
    for name in [name for name in found if name.endswith(".weight_packed")]:
        module = name.removesuffix(".weight_packed")
        scale = found.pop(f"{module}.weight_scale")
        shape = torch.Size(found.pop(f"{module}.weight_shape").tolist())
        whole = unpack_from_int32(found.pop(name), bits, shape).to(scale.dtype)
        groups = whole.view(shape[0], scale.shape[1], -1) * scale.unsqueeze(-1)
        found[f"{module}.weight"] = groups.reshape(shape).to(dtype)
    return found


def dense_copy(packed: Path, folder: Path) -> Path:
    """The unpacked values as a checkpoint without quantization."""
    folder.mkdir()
    save_file(unpacked(packed), folder / "model.safetensors", {"format": "pt"})
    config = json.loads((packed / "config.json").read_text())
    del config["quantization_config"]
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def gemma3(folder: Path) -> Path:
    torch.manual_seed(5)
    model: Any = Gemma3ForCausalLM(Gemma3TextConfig(**GEMMA3))
    model.to(torch.bfloat16).save_pretrained(folder)
    return folder


@pytest.mark.parametrize("form", ["w4a16", "int8", "emb4"])
def test_transformers_and_the_engine_read_the_same_bits(
    dense: Path, tmp_path: Path, form: str
) -> None:
    folder = convert(dense, tmp_path / "packed", form).out
    ids = checkpoints.prompt(30)
    reference = run_transformers(load_transformers(folder, dequantize=form == "emb4"), ids, STEPS)
    engine = torchtpu_rs.Engine(folder, LIKE, arithmetic="exact")
    assert equal_bits(engine.logits(ids, all=True), reference.prompt) is None
    assert equal_bits(engine.logits(ids, reference.new_ids[:-1]), reference.steps) is None
    copy = dense_copy(folder, tmp_path / "dense")
    assert torch.equal(
        torchtpu_rs.Engine(copy, LIKE, arithmetic="exact").logits(ids, all=True),
        engine.logits(ids, all=True),
    )
    formats = {"w4a16": "int4", "int8": "int8", "emb4": "int4"}
    fast = torchtpu_rs.Engine(folder, LIKE, arithmetic="fast")
    assert fast.info()["weight_format"] == formats[form]
    near = fast.logits(ids, all=True) - reference.prompt.float()
    assert near.square().mean() < 0.001 * reference.prompt.float().square().mean()


@pytest.mark.parametrize("form", ["w4a16", "int8", "emb4"])
def test_the_error_that_is_told_is_that_of_the_values_that_are_read(
    dense: Path, tmp_path: Path, form: str
) -> None:
    done = convert(dense, tmp_path / "packed", form)
    source, found = tensors(dense), unpacked(done.out)
    packed = [
        name.removesuffix("_shape") for name in tensors(done.out) if name.endswith("weight_shape")
    ]
    packed = [name for name in packed if name in source]
    squares = sum((found[n].double() - source[n].double()).square().sum().item() for n in packed)
    wanted = sum(source[n].double().square().sum().item() for n in packed)
    assert done.relative_error == pytest.approx((squares / wanted) ** 0.5, rel=1e-6)
    assert done.packed_weights == sum(source[n].numel() for n in packed)
    for name, tensor in source.items():
        assert name in packed or torch.equal(found[name], tensor), name
    assert done.written_bytes == sum(t.nbytes for t in tensors(done.out).values())


@pytest.mark.parametrize("form", ["w4a16", "emb4"])
def test_weights_trained_on_the_grid_are_packed_without_loss(
    dense: Path, tmp_path: Path, form: str
) -> None:
    on_grid = dense_copy(convert(dense, tmp_path / "first", "w4a16").out, tmp_path / "grid")
    found = tensors(on_grid)
    for name in ("model.embed_tokens.weight", "model.embed_tokens_per_layer.weight"):
        found[name] = torch.randint(-8, 8, found[name].shape).to(torch.bfloat16) * 2**-5
    save_file(found, on_grid / "model.safetensors", {"format": "pt"})
    done = convert(on_grid, tmp_path / "second", form)
    assert done.lossless == done.groups > 0
    assert done.relative_error == 0
    ids = checkpoints.prompt(20)
    wanted = torchtpu_rs.Engine(on_grid, LIKE, arithmetic="exact").logits(ids, all=True)
    packed = torchtpu_rs.Engine(done.out, LIKE, arithmetic="exact").logits(ids, all=True)
    assert torch.equal(packed, wanted)


@pytest.mark.parametrize("form", ["w4a16", "int8"])
def test_gemma_3_is_read_by_transformers_as_its_unpacked_values(tmp_path: Path, form: str) -> None:
    done = convert(gemma3(tmp_path / "gemma3"), tmp_path / "packed", form)
    assert done.packed_weights == 6 * (128 * 64 + 2 * 32 * 64 + 64 * 128 + 3 * 128 * 64)
    ids = checkpoints.prompt(20)
    found = run_transformers(load_transformers(done.out), ids, STEPS)
    copy = load_transformers(dense_copy(done.out, tmp_path / "dense"))
    assert equal_bits(found.prompt, run_transformers(copy, ids, STEPS).prompt) is None


def test_shards_and_both_naming_forms_give_the_same_tensors(dense: Path, tmp_path: Path) -> None:
    wanted = tensors(convert(dense, tmp_path / "one", "emb4").out)
    cut = checkpoints.make(tmp_path / "cut", max_shard_size="100KB")
    assert len(list(cut.glob("*.safetensors"))) > 2
    done = convert(cut, tmp_path / "many", "emb4", shard_bytes=60_000)
    found = tensors(done.out)
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)
    index = json.loads((done.out / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == done.written_bytes
    assert set(index["weight_map"]) == set(wanted)
    for name, file in index["weight_map"].items():
        assert name in load_file(done.out / file)
    ids = checkpoints.prompt(20)
    logits = torchtpu_rs.Engine(tmp_path / "one", LIKE).logits(ids, all=True)
    assert torch.equal(torchtpu_rs.Engine(done.out, LIKE).logits(ids, all=True), logits)
    long = tmp_path / "long"
    shutil.copytree(dense, long)
    renamed = {n.replace("model.", "model.language_model."): t for n, t in tensors(dense).items()}
    save_file(renamed, long / "model.safetensors", {"format": "pt"})
    other = tensors(convert(long, tmp_path / "long4", "emb4").out)
    assert all(
        torch.equal(other[name.replace("model.", "model.language_model.")], wanted[name])
        for name in wanted
    )


def test_the_same_input_gives_the_same_bytes_laid_out_as_safetensors_does(
    dense: Path, tmp_path: Path
) -> None:
    once = convert(dense, tmp_path / "once", "emb4").out / "model.safetensors"
    again = convert(dense, tmp_path / "again", "emb4").out / "model.safetensors"
    assert once.read_bytes() == again.read_bytes()
    save_file(load_file(once), tmp_path / "theirs.safetensors", {"format": "pt"})
    assert once.read_bytes() == (tmp_path / "theirs.safetensors").read_bytes()


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
def test_other_types_keep_their_own_for_factors(tmp_path: Path, dtype: torch.dtype) -> None:
    source = checkpoints.make(tmp_path / "dense", dtype=dtype)
    done = convert(source, tmp_path / "packed", "w4a16")
    found = tensors(done.out)
    assert found["model.layers.0.mlp.up_proj.weight_scale"].dtype == dtype
    ids = checkpoints.prompt(20)
    reference = run_transformers(load_transformers(done.out), ids, STEPS)
    engine = torchtpu_rs.Engine(done.out, LIKE, arithmetic="exact")
    assert equal_bits(engine.logits(ids, all=True), reference.prompt) is None


def test_keys_that_no_layer_reads_are_left_out_and_other_files_come_along(
    dense: Path, tmp_path: Path
) -> None:
    source = tmp_path / "source"
    shutil.copytree(dense, source)
    extra = {"model.layers.8.self_attn.k_proj.weight": torch.ones(64, 64, dtype=torch.bfloat16)}
    save_file(tensors(dense) | extra, source / "model.safetensors", {"format": "pt"})
    for name in ("tokenizer.json", "chat_template.jinja", "NOTICE.txt"):
        (source / name).write_text(name)
    done = convert(source, tmp_path / "packed", "w4a16")
    assert done.dropped == list(extra)
    assert not [name for name in tensors(done.out) if "layers.8.self_attn.k_proj" in name]
    for name in ("tokenizer.json", "chat_template.jinja", "NOTICE.txt", "generation_config.json"):
        assert (done.out / name).read_bytes() == (source / name).read_bytes()


class StoppedError(Exception):
    """What ends a run in its middle."""


@pytest.mark.parametrize("replaces", [False, True])
def test_a_run_that_breaks_off_leaves_everything_as_it_was(
    dense: Path, tmp_path: Path, replaces: bool
) -> None:
    out = tmp_path / "out"
    if replaces:
        convert(dense, out, "int8")
    before = {file.name: file.read_bytes() for file in out.iterdir()} if replaces else {}

    def stop(done: int, total: int) -> None:
        if done > total / 2:
            raise StoppedError

    with pytest.raises(StoppedError):
        convert(dense, out, "w4a16", force=True, progress=stop)
    assert out.exists() == replaces
    assert [file.name for file in tmp_path.iterdir()] == ["out"] * replaces
    assert {name: (out / name).read_bytes() for name in before} == before
    assert convert(dense, out, "w4a16", force=True).out == out
    assert [file.name for file in tmp_path.iterdir()] == ["out"]


def refused(source: Path, out: Path, form: str = "w4a16", **options: Any) -> str:
    before = sorted(out.parent.iterdir())
    with pytest.raises(QuantizeError) as caught:
        convert(source, out, form, **options)
    assert sorted(out.parent.iterdir()) == before
    return str(caught.value)


def test_a_folder_in_use_is_refused(dense: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    (out / "thesis.txt").write_text("years of work")
    assert "replace it with --force" in refused(dense, out)
    assert "found a folder without config.json" in refused(dense, out, force=True)
    assert "apart from the checkpoint's own" in refused(dense, dense, force=True)
    assert "apart from the checkpoint's own" in refused(dense, dense.parent, force=True)
    assert "found a file" in refused(dense, out / "thesis.txt")
    assert (out / "thesis.txt").read_text() == "years of work"


def test_what_is_packed_already_or_of_another_family_is_refused(
    dense: Path, tmp_path: Path
) -> None:
    packed = convert(dense, tmp_path / "packed", "w4a16").out
    out = tmp_path / "out"
    assert "found quantization_config (compressed-tensors)" in refused(packed, out)
    config = json.loads((packed / "config.json").read_text())
    del config["quantization_config"]
    (packed / "config.json").write_text(json.dumps(config))
    assert "weight_packed: expected weights that are not packed yet" in refused(packed, out)
    config["model_type"] = "llama"
    (packed / "config.json").write_text(json.dumps(config))
    (packed / "model.safetensors").unlink()
    shutil.copy(dense / "model.safetensors", packed)
    assert "model_type: expected gemma3_text" in refused(packed, out)
    assert "format: expected w4a16, int8, emb4, found 'q2'" in refused(dense, out, "q2")


def test_a_full_disk_is_noticed_before_anything_is_written(
    dense: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=1000))
    assert "of free space for the packed checkpoint, found 0.00 GB" in refused(
        dense, tmp_path / "out"
    )


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"", "is the file whole?"),
        ((1 << 40).to_bytes(8, "little") + b"{}", "is the file whole?"),
        ((2).to_bytes(8, "little") + b"[]", "expected a header of tensors, found list"),
        ((2).to_bytes(8, "little") + b"{]", "expected a header in JSON"),
    ],
)
def test_a_file_that_is_no_safetensors_is_refused(
    dense: Path, tmp_path: Path, data: bytes, words: str
) -> None:
    source = tmp_path / "source"
    shutil.copytree(dense, source)
    (source / "model.safetensors").write_bytes(data)
    assert words in refused(source, tmp_path / "out")


@pytest.mark.parametrize(
    "entry",
    [
        {"dtype": "BF16", "shape": [1 << 40, 1 << 40], "data_offsets": [0, 4]},
        {"dtype": "BF16", "shape": [2], "data_offsets": [1 << 40, (1 << 40) + 4]},
        {"dtype": "BF16", "shape": [-2, -1], "data_offsets": [0, 4]},
        {"dtype": "Q9", "shape": [2], "data_offsets": [0, 4]},
        {"dtype": "BF16", "shape": 2, "data_offsets": [0, 4]},
        {"dtype": "BF16", "shape": [2], "data_offsets": [0]},
        7,
    ],
)
def test_a_header_that_lies_is_refused_by_the_tensors_name(
    dense: Path, tmp_path: Path, entry: object
) -> None:
    source = tmp_path / "source"
    shutil.copytree(dense, source)
    header = json.dumps({"model.norm.weight": entry}).encode()
    data = len(header).to_bytes(8, "little") + header + bytes(16)
    (source / "model.safetensors").write_bytes(data)
    assert "model.norm.weight: expected" in refused(source, tmp_path / "out")


def test_a_weight_that_is_not_finite_is_refused_by_its_name(dense: Path, tmp_path: Path) -> None:
    source = tmp_path / "source"
    shutil.copytree(dense, source)
    found = tensors(dense)
    found["model.layers.1.mlp.up_proj.weight"][3, 5] = float("nan")
    save_file(found, source / "model.safetensors", {"format": "pt"})
    assert "model.layers.1.mlp.up_proj.weight: expected finite weights" in refused(
        source, tmp_path / "out"
    )


MEMORY = """
import sys
from pathlib import Path
from quantize import convert

def peak():
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM"))

small, large, out = map(Path, sys.argv[1:])
convert(small, out / "small", "emb4")
before = peak()
convert(large, out / "packed", "emb4")
print(peak() - before)
"""


def test_memory_does_not_grow_with_the_checkpoint(dense: Path, tmp_path: Path) -> None:
    """A layer's experts, and a tensor that is copied, are larger than what the peak may grow by; the file is several times that."""
    large = tmp_path / "large"
    shutil.copytree(dense, large)
    found = tensors(dense)
    steps = torch.randint(-8, 8, (1 << 19, 64)).to(torch.bfloat16)
    found["model.embed_tokens.weight"] = steps[: 1 << 18].clone()
    found["model.embed_tokens_per_layer.weight"] = steps[: 1 << 18].clone()
    found["model.layers.0.experts.down_proj"] = steps.view(128, 1 << 12, 64)
    found["model.some_tower.weight"] = steps.clone()
    save_file(found, large / "model.safetensors", {"format": "pt"})
    allowed = 40 << 20
    assert steps.nbytes > allowed
    assert (large / "model.safetensors").stat().st_size > 3.5 * allowed
    done = subprocess.run(
        [sys.executable, "-c", MEMORY, str(dense), str(large), str(tmp_path)],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) < allowed, done.stdout
