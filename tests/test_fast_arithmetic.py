"""Fast arithmetic is the same model: near float32, and the same bits however a text is cut and on any number of threads."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import torchtpu_rs
from tests import checkpoints, pack
from tests.pack import Packing

LIKE = torch.zeros(1)
PROMPT = checkpoints.prompt(40)
FORCED = checkpoints.prompt(24, seed=8)
KINDS = [
    "DENSE",
    "K_EQ_V",
    "ONE_KV_HEAD",
    "NO_GROUPS",
    "EXPERTS",
    "GEMMA3",
    "GEMMA3_ONE_KV_HEAD",
    "GEMMA3_NO_GROUPS",
]


def engine(folder: Path, **options: Any) -> torchtpu_rs.Engine:
    return torchtpu_rs.Engine(folder, LIKE, 256, **options)


@pytest.fixture
def three_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    yield
    torch.set_num_threads(before)


def distance(found: torch.Tensor, truth: torch.Tensor) -> float:
    """Mean of squares, as a share of the truth's."""
    difference = found.double() - truth.double()
    return (difference.square().mean() / truth.double().square().mean()).item()


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_layer_is_nearer_to_float32_than_transformers_bfloat16(
    tmp_path: Path, kind: str
) -> None:
    folder = checkpoints.make(tmp_path, getattr(checkpoints, kind))
    truth = engine(folder, dtype="float32").logits(PROMPT, FORCED)
    exact = engine(folder).logits(PROMPT, FORCED)
    fast = engine(folder, arithmetic="fast").logits(PROMPT, FORCED)
    assert fast.dtype == torch.float32
    assert 0 < distance(fast, truth) < distance(exact, truth)


@pytest.mark.parametrize(
    "packing",
    [
        Packing(),
        Packing(tables=True),
        Packing(group_size=16),
        Packing(symmetric=False),
        Packing(group_size=None),
        Packing(group_size=64),
        Packing(num_bits=8),
        Packing(num_bits=8, group_size=16),
        Packing(num_bits=8, group_size=None, tables=True),
    ],
    ids=str,
)
def test_every_packing_is_read_with_a_kernel_for_it_or_without(
    dense: Path, tmp_path: Path, packing: Packing
) -> None:
    folder = pack.make(tmp_path, dense, packing)
    fast = engine(folder, arithmetic="fast")
    has_kernel = packing.symmetric and packing.group_size != 16
    format_of_kernel = f"int{packing.num_bits}"
    assert fast.info()["weight_format"] == (format_of_kernel if has_kernel else "bfloat16")
    # Exact mode rounds what it unpacks to bfloat16, in float32 too where transformers does.
    truth = engine(folder, dtype="float32").logits(PROMPT, FORCED)
    assert 0 < distance(fast.logits(PROMPT, FORCED), truth) < 0.001


@pytest.mark.parametrize("packed", [False, True], ids=["bf16", "w4a16"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_text_has_the_same_bits_in_chunks_of_any_size_and_token_by_token(
    tmp_path: Path, kind: str, packed: bool, three_threads: None
) -> None:
    folder = checkpoints.make(tmp_path / "dense", getattr(checkpoints, kind))
    if packed:
        folder = pack.make(tmp_path / "packed", folder, Packing(tables=True))
    text = [*PROMPT, *FORCED]
    wanted = engine(folder, arithmetic="fast").logits(text, all=True)
    for chunk in (2, 7, 8, 9, 63):
        other = engine(folder, arithmetic="fast", prefill_chunk=chunk)
        assert torch.equal(other.logits(text, all=True), wanted)
        assert torch.equal(other.logits(PROMPT), wanted[len(PROMPT) - 1 : len(PROMPT)])
        assert torch.equal(other.logits(text[:1], text[1:]), wanted)
    torch.set_num_threads(1)
    alone = engine(folder, arithmetic="fast")
    assert torch.equal(alone.logits(text, all=True), wanted)


def test_a_table_that_is_the_head_too_counts_once(dense: Path) -> None:
    fast, exact = engine(dense, arithmetic="fast").info(), engine(dense).info()
    assert fast["weight_bytes"] == exact["weight_bytes"]


def test_a_sequence_begins_anew_whatever_came_before_it(dense: Path) -> None:
    one = engine(dense, arithmetic="fast")
    wanted = one.decode(PROMPT, 30, stop=[]).ids
    one.decode(checkpoints.prompt(100, seed=9), 50, stop=[])
    assert one.decode(PROMPT, 30, stop=[]).ids == wanted


def test_what_is_chosen_has_the_largest_logit_and_is_not_forbidden(dense: Path) -> None:
    one = engine(dense, arithmetic="fast")
    chosen = one.decode(PROMPT, 20, stop=[]).ids
    logits = one.logits(PROMPT, chosen[:-1])
    assert logits.argmax(-1).tolist() == chosen


def test_ids_that_generation_config_forbids_are_not_chosen(tmp_path: Path) -> None:
    folder = checkpoints.make(tmp_path)
    first = engine(folder, arithmetic="fast").decode(PROMPT, 1, stop=[]).ids
    (folder / "generation_config.json").write_text(
        f'{{"eos_token_id": 1, "suppress_tokens": {first}}}'
    )
    second = engine(folder, arithmetic="fast")
    assert second.decode(PROMPT, 1, stop=[]).ids == [
        second.logits(PROMPT)[0].index_fill(0, torch.tensor(first), -100).argmax().item()
    ]


def test_a_long_prompt_can_be_cancelled_between_its_chunks(dense: Path) -> None:
    one = engine(dense, arithmetic="fast", prefill_chunk=16)
    wanted = one.decode(PROMPT, 5, stop=[]).ids
    heard: list[list[int]] = []

    def until(calls: int) -> torchtpu_rs.Decoded:
        heard.clear()

        def hear(ids: list[int]) -> bool:
            heard.append(ids)
            return len(heard) < calls

        return one.decode(PROMPT, 5, stop=[], on_tokens=hear)

    cancelled = until(2)
    assert (cancelled.ids, cancelled.finish, heard) == ([], "cancelled", [[], []])
    # 40 tokens are three chunks.
    whole = until(100)
    assert heard == [[], [], *([i] for i in wanted)]
    assert whole.ids == wanted


def test_a_full_cache_ends_the_answer(dense: Path) -> None:
    small = torchtpu_rs.Engine(dense, LIKE, 48, arithmetic="fast")
    done = small.decode(PROMPT, 100, stop=[])
    assert (done.finish, len(done.ids)) == ("length", 9)
    assert done.ids == engine(dense, arithmetic="fast").decode(PROMPT, 9, stop=[]).ids


def test_weights_of_another_type_are_converted_and_other_types_run_exactly(tmp_path: Path) -> None:
    folder = checkpoints.make(tmp_path, dtype=torch.float32)
    exact = engine(folder)
    # In float32 there are no kernels: fast is exact.
    assert torch.equal(engine(folder, arithmetic="fast").logits(PROMPT), exact.logits(PROMPT))
    fast = engine(folder, arithmetic="fast", dtype="bfloat16")
    assert 0 < distance(fast.logits(PROMPT, FORCED), exact.logits(PROMPT, FORCED)) < 0.001


def test_parts_tell_where_the_time_of_an_answer_went(dense: Path) -> None:
    one = engine(dense, arithmetic="fast")
    assert one.parts() == []
    done = one.decode(PROMPT, 10, stop=[])
    parts = {name: (seconds, size) for name, seconds, size in one.parts()}
    assert {"qkv", "attention", "o_proj", "gate_up", "down_proj", "per_layer", "head"} <= set(parts)
    assert 0 < sum(seconds for seconds, _ in parts.values()) <= done.decode_seconds
    assert parts["head"][1] == 9 * checkpoints.VOCAB * checkpoints.DENSE["hidden_size"] * 2
    assert engine(dense).parts() == []
