"""The memory that a checkpoint will need is known from config.json or a GGUF file's header, and is what the engine then has."""

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from gguf import GGUFReader

import torchtpu_rs
import tpu
from quantize import convert
from tests import checkpoints, gguf_files, pack
from tests.gguf_files import Kind
from tests.pack import Packing
from torchtpu_rs import memory_needed
from tpu.v5e import HBM_BYTES

LIKE = torch.zeros(1)

PARAMETERS = {
    "e2b": 4_628_569_379,
    "e4b": 7_463_013_418,
    "12b": 11_907_350_320,
    "26b_a4b": 25_233_141_790,
    "31b": 30_697_345_340,
}
"""Of the text part, tied, as the metadata of the published safetensors has them."""

NAMES = {"E2B": "e2b", "E4B": "e4b", "12B": "12b", "26B-A4B": "26b_a4b", "31B": "31b"}

WIDE: dict[str, Any] = {"hidden_size": 256, "intermediate_size": 256, "moe_intermediate_size": 256}
WIDE |= {"vocab_size": 500, "vocab_size_per_layer_input": 500}
"""Widths of whole blocks of every type, in most matrices, and rows that are no whole records of sixteen."""

TYPES = [Kind.F32, Kind.F16, Kind.BF16, Kind.Q8_0, Kind.Q5_0, Kind.Q4_0, *gguf_files.K_TYPES]

KINDS = ["DENSE", "K_EQ_V", "E4B", "TWELVE_B", "THIRTY_ONE_B", "EXPERTS", "GEMMA3"]


@pytest.mark.parametrize("member", PARAMETERS)
def test_the_published_members_need_two_bytes_a_published_parameter(member: str) -> None:
    needed = memory_needed(tpu.E2B.parent / member)
    assert needed["weight_bytes"] == 2 * PARAMETERS[member]


def description(checkpoint: Path) -> Path:
    """A folder with nothing but its config.json; of a GGUF file the header and the one tensor that describes, with zeros for weights."""
    alone = checkpoint.with_name(f"alone-{checkpoint.name}")
    if checkpoint.is_dir():
        alone.mkdir(exist_ok=True)
        shutil.copy(checkpoint / "config.json", alone)
    else:
        reader, content = GGUFReader(checkpoint), checkpoint.read_bytes()
        alone.write_bytes(content[: reader.data_offset])
        os.truncate(alone, len(content))
        with alone.open("r+b") as file:
            for tensor in reader.tensors:
                if tensor.name == "rope_freqs.weight":
                    file.seek(tensor.data_offset)
                    file.write(content[tensor.data_offset :][: tensor.n_bytes])
    return alone


def assert_as_needed(checkpoint: Path, context: int, how: dict[str, Any], **engine: Any) -> None:
    """What is asked of a description alone is what `Engine.info()` says."""
    needed = memory_needed(description(checkpoint), context, **how)
    info = torchtpu_rs.Engine(checkpoint, LIKE, context, **engine).info()
    assert needed["weight_bytes"] == info["weight_bytes"]
    assert needed["cache_bytes"] == info["cache_bytes"]
    assert needed["weight_format"] == info["weight_format"]
    assert needed["context"] == info["layout"]["context"]
    assert needed["working_bytes"] > 0


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("context", [5, 300, 9000])
def test_weights_and_cache_are_what_the_engine_then_has(
    tmp_path: Path, kind: str, context: int
) -> None:
    folder = checkpoints.make(tmp_path / "made", getattr(checkpoints, kind))
    assert_as_needed(folder, context, {})
    assert_as_needed(folder, context, {"dtype": "float32"}, dtype="float32")
    assert_as_needed(folder, context, {"arithmetic": "fast"}, arithmetic="fast")
    rings = {"arithmetic": "compiled", "slots": 1, "spare": 16}
    assert_as_needed(folder, context, rings, arithmetic="compiled", prefill_chunk=16)
    int8 = rings | {"weight_format": "int8"}
    assert_as_needed(folder, context, int8, arithmetic="int8", prefill_chunk=16)


@pytest.mark.parametrize("kind", ["DENSE", "EXPERTS"])
@pytest.mark.parametrize(
    "packing",
    [
        Packing(),
        Packing(tables=True),
        Packing(num_bits=8, tables=True),
        Packing(num_bits=8, group_size=None, tables=True),
    ],
    ids=["w4", "w4_tables", "w8", "w8_rows"],
)
def test_packed_weights_count_as_they_are_multiplied(
    tmp_path: Path, kind: str, packing: Packing
) -> None:
    """Widths of whole records: 16 rows, 64 columns."""
    settings = getattr(checkpoints, kind) | {"num_experts": 16, "intermediate_size": 128}
    settings |= {"hidden_size_per_layer_input": 0}
    folder = checkpoints.make(tmp_path / "made", settings)
    if kind == "EXPERTS":
        folder = checkpoints.split_experts(tmp_path / "split", folder)
    folder = pack.make(tmp_path / "packed", folder, packing)
    assert_as_needed(folder, 300, {}, arithmetic="auto")
    what_if = memory_needed(folder, weight_format="dense", arithmetic="exact")
    exact = torchtpu_rs.Engine(folder, LIKE).info()
    assert what_if["weight_bytes"] == exact["weight_bytes"]


@pytest.fixture(scope="module", params=["DENSE", "EXPERTS"])
def wide(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    settings = getattr(checkpoints, request.param) | WIDE
    return checkpoints.make(tmp_path_factory.mktemp(request.param) / "folder", settings)


@pytest.mark.parametrize("kind", [*TYPES, TYPES], ids=lambda kind: getattr(kind, "name", "mixed"))
def test_weights_of_a_gguf_file_are_counted_in_the_forms_in_which_they_are_multiplied(
    wide: Path, tmp_path: Path, kind: Kind | list[Kind]
) -> None:
    file = gguf_files.convert(wide, tmp_path / "model.gguf", kind)
    assert_as_needed(file, 300, {}, arithmetic="auto")
    assert_as_needed(file, 300, {"arithmetic": "fast"}, arithmetic="fast")
    assert_as_needed(file, 300, {"arithmetic": "exact"})
    assert_as_needed(file, 300, {"dtype": "float32"}, arithmetic="auto", dtype="float32")
    rings = {"arithmetic": "compiled", "slots": 1, "spare": 16}
    assert_as_needed(file, 300, rings, arithmetic="compiled", prefill_chunk=16)


@pytest.mark.parametrize("kind", [Kind.Q6_K, Kind.F16], ids=lambda kind: kind.name)
def test_a_head_of_its_own_in_a_gguf_file_is_counted_beside_the_table(
    wide: Path, tmp_path: Path, kind: Kind
) -> None:
    keys, tensors, _ = gguf_files.parts_of(wide, Kind.Q8_0)
    head = gguf_files.blocks(torch.ones(WIDE["vocab_size"], WIDE["hidden_size"]), kind, 0)
    file = gguf_files.write(
        tmp_path / "model.gguf", keys, tensors | {"output.weight": (head, kind)}
    )
    assert_as_needed(file, 300, {}, arithmetic="auto")
    assert_as_needed(file, 300, {"arithmetic": "exact"})


def test_a_gguf_file_may_be_asked_about_in_other_forms(wide: Path, tmp_path: Path) -> None:
    def bytes_of(kind: Kind, **how: Any) -> int:
        file = gguf_files.convert(wide, tmp_path / f"{kind.name}.gguf", kind)
        return int(memory_needed(file, arithmetic="fast", **how)["weight_bytes"])

    assert bytes_of(Kind.Q4_0, weight_format="dense") == bytes_of(Kind.BF16)
    assert bytes_of(Kind.Q8_0, weight_format="int4") == bytes_of(Kind.Q4_0)
    assert bytes_of(Kind.Q4_0, weight_format="int8") == bytes_of(Kind.Q8_0)


@pytest.mark.parametrize("form", ["w4a16", "int8", "emb4"])
def test_what_quantize_makes_of_experts_counts_as_it_is_multiplied(
    tmp_path: Path, form: str
) -> None:
    """Their router is not packed, as in the published checkpoints."""
    settings = checkpoints.EXPERTS | {"num_experts": 16, "intermediate_size": 128}
    folder = checkpoints.make(tmp_path / "made", settings)
    packed = convert(folder, tmp_path / "packed", form).out
    assert_as_needed(packed, 300, {}, arithmetic="auto")
    assert_as_needed(packed, 300, {"arithmetic": "exact"}, arithmetic="exact")


def test_experts_that_config_json_has_ignored_count_as_they_are(tmp_path: Path) -> None:
    """As quantizers of linear layers leave them."""
    settings = checkpoints.EXPERTS | {"num_experts": 16, "intermediate_size": 128}
    folder = checkpoints.make(tmp_path / "made", settings)
    packed = pack.make(tmp_path / "packed", folder, Packing())
    file = packed / "config.json"
    config = json.loads(file.read_text())
    config["quantization_config"]["ignore"].append("re:.*experts.*")
    file.write_text(json.dumps(config))
    assert_as_needed(packed, 300, {}, arithmetic="auto")


def test_a_context_beyond_the_checkpoints_counts_as_the_checkpoints() -> None:
    most = memory_needed(tpu.E2B, 131_072)
    assert memory_needed(tpu.E2B, 200_000) == most
    assert memory_needed(tpu.E2B, 1000)["cache_bytes"] < most["cache_bytes"]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"context": 0}, "expected context 1 to"),
        ({"context": 2**40}, "expected context 1 to"),
        ({"weight_format": "int3"}, "expected weight_format dense, int8 or int4"),
        ({"arithmetic": "quick"}, "expected arithmetic"),
        ({"dtype": "int8"}, "expected dtype"),
        ({"arithmetic": "compiled", "slots": 2**40}, "expected slots 1 to"),
        ({"arithmetic": "compiled", "spare": 0}, "expected spare 1 to"),
        ({"arithmetic": "fast", "dtype": "float32"}, "expected bfloat16"),
    ],
    ids=str,
)
def test_a_question_that_has_no_answer_is_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        memory_needed(tpu.E2B, **options)


def test_sizes_that_nobody_has_are_refused_before_they_are_multiplied(tmp_path: Path) -> None:
    config = json.loads((tpu.E2B / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"hidden_size": 2**62}))
    with pytest.raises(torchtpu_rs.CheckpointError, match="hidden_size"):
        memory_needed(tmp_path)
    largest = {"hidden_size": 2**18, "num_attention_heads": 2**18, "num_key_value_heads": 2**18}
    (tmp_path / "config.json").write_text(json.dumps(config | largest | {"global_head_dim": 2**18}))
    needed = memory_needed(tmp_path, 2**19, arithmetic="compiled", slots=2**16, spare=2**19)
    assert needed["cache_bytes"] == 2**64 - 1
    with pytest.raises(torchtpu_rs.CheckpointError, match="expected a checkpoint folder"):
        memory_needed(tmp_path / "nothing")


def test_the_table_of_what_fits_a_chip_is_what_is_computed() -> None:
    """In docs/tpu.md: gigabytes of weights, cache and working memory, bold where they are within the chip's 16."""
    text = (Path(__file__).parents[1] / "docs/tpu.md").read_text()
    for name, member in NAMES.items():
        cells = []
        for slots in (8, 2):
            for weight_format in ("dense", "int8", "int4"):
                needed = memory_needed(
                    tpu.E2B.parent / member,
                    arithmetic="compiled",
                    weight_format=weight_format,
                    slots=slots,
                )
                total = sum(value for key, value in needed.items() if key.endswith("_bytes"))
                cell = f"{total / 1e9:.1f}"
                cells.append(f"**{cell}**" if total <= HBM_BYTES else cell)
        assert f"| {name} | {' | '.join(cells)} |" in text
