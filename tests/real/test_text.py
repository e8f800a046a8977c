"""What the real model says, against transformers reading the same file in bfloat16: the same tokens, one by one."""

from pathlib import Path
from typing import Any

import pytest
import torch

import torchtpu_rs
from bench.exact import equal_bits, run_transformers
from server.loading import load_text_side
from server.tokenizer import Tokenizer
from tests.real.texts import PROMPTS, cases

TOKENS = 64


@pytest.fixture(scope="module")
def tokenizer(model_file: Path) -> Tokenizer:
    return load_text_side(model_file).tokenizer


@pytest.fixture(scope="module")
def engine(model_file: Path) -> torchtpu_rs.Engine:
    """The file in exact arithmetic."""
    return torchtpu_rs.Engine(model_file, torch.zeros(1), 512, arithmetic="exact")


@pytest.mark.parametrize("name", cases())
def test_a_prompt_is_continued_as_by_transformers(
    engine: torchtpu_rs.Engine, reference: Any, tokenizer: Tokenizer, name: str
) -> None:
    assert tokenizer.bos_id is not None
    ids = [tokenizer.bos_id, *tokenizer.encode_text(PROMPTS[name])]
    expected = run_transformers(reference, ids, TOKENS, whole_prompt=False)
    made = engine.decode(ids, TOKENS, stop=[]).ids
    assert made == expected.new_ids, f"{tokenizer.decode(made)!r}"
    assert equal_bits(engine.logits(ids), expected.steps[:1]) is None


def test_every_logit_of_a_prompt_is_transformers_own(
    engine: torchtpu_rs.Engine, reference: Any
) -> None:
    """With tied embeddings every row of every tensor has a part in them."""
    ids = [2, 818, 5279, 529, 7001, 563, 886, 529, 506, 7001]
    expected = run_transformers(reference, ids, 1).prompt
    assert equal_bits(engine.logits(ids, all=True), expected) is None
