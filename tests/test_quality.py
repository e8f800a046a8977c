"""The arithmetic of compiled programs, judged by teacher forcing on the embedded model's held-out chats."""

import pytest
import torch

import torchtpu_rs
from bench.quality import CHUNK, Judged, judge_all, texts_of
from models import EMBEDDED, EMBEDDED_W4A16

CHATS = 8
BAR = 0.001
"""Nats of mean divergence. transformers' own noise here is 0.0003, and what is judged 0.0004 and 0.0005 (docs/log.md)."""


@pytest.fixture(scope="module")
def texts() -> list[list[int]]:
    return texts_of(EMBEDDED, CHATS, 0)


@pytest.fixture(scope="module")
def wanted(texts: list[list[int]]) -> list[torch.Tensor]:
    exact = torchtpu_rs.Engine(EMBEDDED, torch.zeros(1), 1024)
    return [exact.logits(ids, all=True) for ids in texts]


def judged(arithmetic: str, texts: list[list[int]], wanted: list[torch.Tensor]) -> Judged:
    engine = torchtpu_rs.Engine(
        EMBEDDED, torch.zeros(1), 1024, prefill_chunk=CHUNK, arithmetic=arithmetic
    )
    return judge_all(wanted, [engine.logits(ids, all=True) for ids in texts])


def test_compiled_arithmetic_in_bfloat16_is_about_as_far_from_exact_mode_as_transformers_from_itself(
    texts: list[list[int]], wanted: list[torch.Tensor]
) -> None:
    exact = torchtpu_rs.Engine(EMBEDDED, torch.zeros(1), 1024)
    # Exact mode reading the same tokens one at a time: transformers' bits too.
    noise = judge_all(wanted, [exact.logits(ids[:1], ids[1:]) for ids in texts])
    found = judged("compiled", texts, wanted)
    assert len(found.agrees) > 1000
    assert 0 < found.divergence.mean() < BAR
    assert 0 < noise.divergence.mean() < BAR
    assert found.margin[~found.agrees].max() < 0.5 < found.margin.median()


def test_four_bit_weights_multiplied_as_they_are_change_about_as_much_as_transformers_own_noise(
    texts: list[list[int]],
) -> None:
    exact = torchtpu_rs.Engine(EMBEDDED_W4A16, torch.zeros(1), 1024)
    fast = torchtpu_rs.Engine(EMBEDDED_W4A16, torch.zeros(1), 1024, arithmetic="fast")
    assert (exact.info()["weight_format"], fast.info()["weight_format"]) == ("bfloat16", "int4")
    wanted = [exact.logits(ids, all=True) for ids in texts]
    noise = judge_all(wanted, [exact.logits(ids[:1], ids[1:]) for ids in texts])
    found = judge_all(wanted, [fast.logits(ids, all=True) for ids in texts])
    # Exact mode rounds each unpacked weight to bfloat16; here none is.
    assert 0 < found.divergence.mean() < BAR
    assert 0 < noise.divergence.mean() < BAR
    assert found.margin[~found.agrees].max() < 0.5 < found.margin.median()


def test_weights_that_are_not_packed_give_the_same_bits_in_fast_mode(
    texts: list[list[int]], wanted: list[torch.Tensor]
) -> None:
    fast = torchtpu_rs.Engine(EMBEDDED, torch.zeros(1), 1024, arithmetic="fast")
    assert torch.equal(fast.logits(texts[0], all=True), wanted[0])


def test_int8_changes_one_prediction_in_fifty_at_most_and_none_that_was_clear(
    texts: list[list[int]], wanted: list[torch.Tensor]
) -> None:
    found = judged("int8", texts, wanted)
    assert 0 < found.divergence.mean() < 0.002
    assert found.agrees.double().mean() > 0.98
    assert found.margin[~found.agrees].max() < 1.0 < found.margin.median()
