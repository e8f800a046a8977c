"""Exact mode is transformers, bit for bit: every logit of prefill and of each decoded step."""

import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

import torchtpu_rs
from bench.exact import equal_bits, load_transformers, run_transformers
from tests import checkpoints

STEPS = 24

VARIATIONS = {
    "dense": checkpoints.DENSE,
    "k_eq_v": checkpoints.K_EQ_V,
    "one_kv_head": checkpoints.ONE_KV_HEAD,
    "no_groups": checkpoints.NO_GROUPS,
    "e4b": checkpoints.E4B,
    "12b": checkpoints.TWELVE_B,
    "31b": checkpoints.THIRTY_ONE_B,
    "26b_a4b": checkpoints.EXPERTS,
    "gemma3": checkpoints.GEMMA3,
    "gemma3_one_kv_head": checkpoints.GEMMA3_ONE_KV_HEAD,
    "gemma3_no_groups": checkpoints.GEMMA3_NO_GROUPS,
}


def assert_same_bits(
    folder: Path, ids: list[int], steps: int, *, whole_prompt: bool = True
) -> None:
    """Compares the whole prompt's logits if asked, each step's, and the tokens chosen."""
    reference = run_transformers(load_transformers(folder), ids, steps, whole_prompt=whole_prompt)
    engine = torchtpu_rs.Engine(folder, torch.zeros(1))
    if whole_prompt:
        assert equal_bits(engine.logits(ids, all=True), reference.prompt) is None
    assert equal_bits(engine.logits(ids, reference.new_ids[:-1]), reference.steps) is None
    assert engine.decode(ids, steps, stop=[]).ids == reference.new_ids


@pytest.mark.parametrize("variation", VARIATIONS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("tokens", [3, 40], ids=lambda n: f"prompt{n}")
def test_logits_are_transformers_bits(
    tmp_path: Path, variation: str, dtype: torch.dtype, tokens: int
) -> None:
    """The window of 8 is crossed in decode by the short prompt, in prefill by the long one."""
    folder = checkpoints.make(tmp_path, VARIATIONS[variation], dtype=dtype)
    assert_same_bits(folder, checkpoints.prompt(tokens), STEPS)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_a_gemma_3_with_towers_in_the_published_spelling_is_transformers_bits(
    tmp_path: Path, dtype: torch.dtype
) -> None:
    """One base a key, the pattern as a number, sizes left to defaults; tensors are named `language_model.model.`."""
    folder = checkpoints.make(tmp_path, checkpoints.GEMMA3_MULTIMODAL, dtype=dtype)
    with safe_open(folder / "model.safetensors", "pt") as file:
        names = file.keys()
    assert "language_model.model.norm.weight" in names
    assert any("vision_tower" in name for name in names)
    assert any("multi_modal_projector" in name for name in names)
    config = json.loads((folder / "config.json").read_text())
    text = config["text_config"]
    for key in ("rope_parameters", "layer_types", "max_position_embeddings", "rms_norm_eps"):
        del text[key]
    text |= {
        "sliding_window_pattern": 3,
        "rope_theta": 500_000,
        "rope_local_base_freq": 5_000,
        "rope_scaling": {"rope_type": "linear", "factor": 4.0},
    }
    (folder / "config.json").write_text(json.dumps(config))
    assert_same_bits(folder, checkpoints.prompt(40), STEPS)


@pytest.mark.usefixtures("all_cores")
@pytest.mark.parametrize("tokens", [40, 509, 560], ids=lambda n: f"prompt{n}")
def test_gemma_3_270m_widths_are_transformers_bits(tmp_path: Path, tokens: int) -> None:
    """Its own matrix and attention shapes; the window of 512 is crossed in decode, then in prefill."""
    folder = checkpoints.make(tmp_path, checkpoints.GEMMA3_270M_SLICE)
    ids = checkpoints.prompt(tokens, vocab=4096)
    assert_same_bits(folder, ids, 5, whole_prompt=tokens == 40)


@pytest.fixture
def all_cores() -> Iterator[None]:
    """The threads a server has by default: kernels may split work, and round, by their number."""
    before = torch.get_num_threads()
    torch.set_num_threads(os.cpu_count() or 1)
    yield
    torch.set_num_threads(before)


@pytest.mark.timeout(600)  # a CPU without bfloat16 instructions does 4 GFLOP/s a core here
@pytest.mark.usefixtures("all_cores")
@pytest.mark.parametrize("tokens", [40, 509, 560], ids=lambda n: f"prompt{n}")
def test_e2b_widths_are_transformers_bits(e2b_slice: Path, tokens: int) -> None:
    """E2B's own matrix and attention shapes; the window of 512 is crossed in decode, then in prefill.

    Long prompts are judged as `generate` runs them, with the sharing layers on the last token only.
    """
    ids = checkpoints.prompt(tokens, vocab=4096)
    assert_same_bits(e2b_slice, ids, 5, whole_prompt=tokens == 40)
