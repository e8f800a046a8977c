"""Exact mode is transformers, bit for bit: every logit of prefill and of each decoded step."""

from pathlib import Path

import checkpoints
import pytest
import torch
from transformers import AutoModelForCausalLM

import torchtpu_rs

STEPS = 24

VARIATIONS = {
    "dense": checkpoints.DENSE,
    "k_eq_v": checkpoints.K_EQ_V,
    "one_kv_head": checkpoints.ONE_KV_HEAD,
    "no_groups": checkpoints.NO_GROUPS,
}


def transformers_run(
    folder: Path, ids: list[int], steps: int
) -> tuple[torch.Tensor, torch.Tensor, list[int]]:
    """Logits of the whole prompt, logits of each generated step, and the tokens generated."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype="auto").eval()
    with torch.no_grad():
        whole = model(torch.tensor([ids])).logits[0]
        made = model.generate(
            torch.tensor([ids]),
            attention_mask=torch.ones(1, len(ids), dtype=torch.long),
            max_new_tokens=steps,
            do_sample=False,
            eos_token_id=-1,
            return_dict_in_generate=True,
            output_logits=True,
        )
    return whole, torch.cat(made.logits), made.sequences[0, len(ids) :].tolist()


def assert_same_bits(ours: torch.Tensor, theirs: torch.Tensor) -> None:
    theirs = theirs.to(ours.dtype)
    same = (ours == theirs).float().mean().item()
    assert torch.equal(ours, theirs), (
        f"{same:.4%} of logits are equal, max difference {(ours.float() - theirs.float()).abs().max()}"
    )


@pytest.mark.parametrize("variation", VARIATIONS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("tokens", [3, 40], ids=lambda n: f"prompt{n}")
def test_logits_are_transformers_bits(
    tmp_path: Path, variation: str, dtype: torch.dtype, tokens: int
) -> None:
    """The window of 8 is crossed in decode by the short prompt, in prefill by the long one."""
    folder = checkpoints.make(tmp_path, VARIATIONS[variation], dtype=dtype)
    ids = checkpoints.prompt(tokens)
    whole, steps, new = transformers_run(folder, ids, STEPS)
    engine = torchtpu_rs.Engine(folder, torch.zeros(1))
    assert_same_bits(engine.logits(ids, all=True), whole)
    assert_same_bits(engine.logits(ids, new[:-1]), steps)
    assert engine.decode(ids, STEPS, stop=[]).ids == new


@pytest.mark.parametrize("tokens", [40, 509], ids=lambda n: f"prompt{n}")
def test_e2b_widths_are_transformers_bits(e2b_slice: Path, tokens: int) -> None:
    """E2B's own matrix and attention shapes; the long prompt crosses the window of 512 in decode."""
    ids = checkpoints.prompt(tokens, vocab=4096)
    whole, steps, new = transformers_run(e2b_slice, ids, 6)
    engine = torchtpu_rs.Engine(e2b_slice, torch.zeros(1))
    assert_same_bits(engine.logits(ids, all=True), whole)
    assert_same_bits(engine.logits(ids, new[:-1]), steps)
