"""Experts of a GGUF file, gates and ups in one tensor or in two, are those of the checkpoint with the values that gguf-py reads."""

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf.quants import dequantize
from safetensors.torch import load_file, save_file

from bench.exact import equal_bits, load_transformers, run_transformers
from tests import checkpoints, gguf_files
from tests.gguf_files import Kind
from tests.test_fast_arithmetic import distance
from tests.test_gguf import FORCED, KERNELS, PROMPT, QUANTIZED, engine, logits
from tests.test_hostile_checkpoints import refused

WIDE: dict[str, Any] = checkpoints.EXPERTS | {
    "hidden_size": 256,
    "intermediate_size": 256,
    "moe_intermediate_size": 256,
    "num_hidden_layers": 3,
    "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
}
"""Rows that are whole blocks of 256."""


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return checkpoints.make(tmp_path_factory.mktemp("wide"), WIDE)


@pytest.mark.parametrize("kind", [Kind.F32, Kind.F16, Kind.BF16, *QUANTIZED], ids=lambda k: k.name)
def test_every_type_gives_transformers_bits_of_the_values_that_gguf_py_reads(
    wide: Path, tmp_path: Path, kind: Kind
) -> None:
    truth = tmp_path / "truth"
    file = gguf_files.convert(wide, tmp_path / "model.gguf", kind, truth=truth)
    reference = run_transformers(load_transformers(truth, torch.bfloat16), PROMPT, 4)
    exact = engine(file)
    assert equal_bits(exact.logits(PROMPT, all=True), reference.prompt) is None
    assert equal_bits(exact.logits(PROMPT, reference.new_ids[:-1]), reference.steps) is None
    assert exact.info()["weight_bytes"] == engine(wide).info()["weight_bytes"]


@pytest.fixture(scope="module")
def every_expert(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Tokens go through all experts: one that rounding sends to another would hide every other difference."""
    settings = WIDE | {"top_k_experts": WIDE["num_experts"]}
    return checkpoints.make(tmp_path_factory.mktemp("every_expert"), settings)


@pytest.mark.parametrize("kind", [Kind.BF16, *QUANTIZED], ids=lambda k: k.name)
def test_fast_mode_is_nearer_to_float32_than_transformers_bfloat16(
    every_expert: Path, tmp_path: Path, kind: Kind
) -> None:
    """Types in blocks are multiplied as they are stored."""
    file = gguf_files.convert(every_expert, tmp_path / "model.gguf", kind)
    fast, exact = engine(file, arithmetic="fast"), engine(file)
    truth = logits(file, dtype="float32")
    found = fast.logits(PROMPT, FORCED, all=True)
    assert 0 < distance(found, truth) < distance(exact.logits(PROMPT, FORCED, all=True), truth)
    name, smaller = KERNELS.get(kind, ("bfloat16", 0.99))
    assert fast.info()["weight_format"] == name
    assert fast.info()["weight_bytes"] < exact.info()["weight_bytes"] / smaller


@pytest.mark.parametrize("kind", QUANTIZED, ids=lambda k: k.name)
def test_most_tokens_are_nearer_in_fast_mode_where_rounding_decides_on_experts_too(
    wide: Path, tmp_path: Path, kind: Kind
) -> None:
    file = gguf_files.convert(wide, tmp_path / "model.gguf", kind)
    truth = logits(file, dtype="float32").double()

    def of_a_token(found: torch.Tensor) -> float:
        return (found.double() - truth).square().mean(-1).median().item()

    fast = logits(file, arithmetic="fast")
    assert 0 < of_a_token(fast) < of_a_token(logits(file))


@pytest.mark.parametrize("kind", [Kind.BF16, *QUANTIZED], ids=lambda k: k.name)
def test_gates_and_ups_apart_give_the_logits_of_fused_ones(
    wide: Path, tmp_path: Path, kind: Kind
) -> None:
    keys, tensors, _ = gguf_files.parts_of(wide, kind)
    fused = gguf_files.write(tmp_path / "fused.gguf", keys, tensors)
    split = gguf_files.with_gates_apart(tensors)
    assert "blk.0.ffn_gate_exps.weight" in split
    apart = gguf_files.write(tmp_path / "apart.gguf", keys, split)
    for options in (
        {"arithmetic": "exact"},
        {"arithmetic": "fast"},
        {"arithmetic": "compiled", "prefill_chunk": 8},
    ):
        one, other = engine(fused, **options), engine(apart, **options)
        assert torch.equal(one.logits(PROMPT), other.logits(PROMPT))
        for fact in ("weight_bytes", "weight_format", "stored_bytes"):
            assert one.info()[fact] == other.info()[fact]


def test_gates_and_ups_may_be_of_different_types(wide: Path, tmp_path: Path) -> None:
    """As mixtures of types have them."""
    keys, tensors, read = gguf_files.parts_of(wide, Kind.Q8_0)
    split = gguf_files.with_gates_apart(tensors)
    for layer in range(WIDE["num_hidden_layers"]):
        fused = f"model.layers.{layer}.experts.gate_up_proj"
        gate, up = read[fused].chunk(2, dim=1)
        data = gguf_files.blocks(gate, Kind.Q6_K, layer)
        split[f"blk.{layer}.ffn_gate_exps.weight"] = data, Kind.Q6_K
        values = torch.from_numpy(dequantize(data, Kind.Q6_K).copy()).to(gate.dtype)
        read[fused] = torch.cat([values, up], dim=1)
    file = gguf_files.write(tmp_path / "model.gguf", keys, split)
    truth = tmp_path / "truth"
    shutil.copytree(wide, truth)
    save_file(read, truth / "model.safetensors")
    assert torch.equal(logits(file), logits(truth))
    fast = engine(file, arithmetic="fast")
    assert fast.info()["weight_format"] == "int6"
    of_float32 = logits(file, dtype="float32")
    assert 0 < distance(fast.logits(PROMPT, FORCED, all=True), of_float32) < 0.001


def test_experts_that_are_here_twice_or_half_are_refused(wide: Path, tmp_path: Path) -> None:
    keys, tensors, _ = gguf_files.parts_of(wide)
    split = gguf_files.with_gates_apart(tensors)
    half = {name: t for name, t in split.items() if name != "blk.1.ffn_up_exps.weight"}
    file = gguf_files.write(tmp_path / "half.gguf", keys, half)
    refused(file, "`model.layers.1.experts.up_proj` is missing")
    file = gguf_files.write(tmp_path / "twice.gguf", keys, tensors | split)
    refused(file, "_exps.weight", "describes no place for it")
    data, kind = split["blk.1.ffn_gate_exps.weight"]
    narrow = split | {"blk.1.ffn_gate_exps.weight": (np.ascontiguousarray(data[:, 1:]), kind)}
    file = gguf_files.write(tmp_path / "narrow.gguf", keys, narrow)
    refused(file, "blk.1.ffn_gate_exps.weight", "expected shape [8, 256, 256]")


def test_experts_in_safetensors_may_not_be_split_and_apart_at_once(tmp_path: Path) -> None:
    fused = checkpoints.make(tmp_path / "fused", checkpoints.EXPERTS)
    folder = checkpoints.split_experts(tmp_path / "split", fused)
    tensors = load_file(folder / "model.safetensors")
    gate = load_file(fused / "model.safetensors")["model.layers.2.experts.gate_up_proj"][:, :64]
    tensors["model.layers.2.experts.gate_proj"] = gate.contiguous()
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    refused(folder, "here twice, split and as `gate_proj`")
