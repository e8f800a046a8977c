"""However a sequence reaches the model, its logits say the same."""

from pathlib import Path

import pytest
import torch

import torchtpu_rs
from tests import checkpoints

LIKE = torch.zeros(1)
WINDOW = checkpoints.DENSE["sliding_window"]
PROMPT = checkpoints.prompt(40)
# Sums in another order: float32 rounding through nine layers, on logits of up to ±30.
TOLERANCE = {"rtol": 0, "atol": 2e-4}


@pytest.fixture(scope="module")
def f32(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return checkpoints.make(tmp_path_factory.mktemp("f32"), dtype=torch.float32)


@pytest.mark.parametrize(
    "split", [1, WINDOW - 1, WINDOW, WINDOW + 1, 2 * WINDOW, 2 * WINDOW + 1, 39]
)
def test_prefill_equals_prefill_of_a_part_and_decode_of_the_rest(f32: Path, split: int) -> None:
    engine = torchtpu_rs.Engine(f32, LIKE)
    whole = engine.logits(PROMPT, all=True)
    parts = engine.logits(PROMPT[:split], PROMPT[split:])
    torch.testing.assert_close(parts, whole[split - 1 :], **TOLERANCE)


@pytest.mark.parametrize("chunk", [2, 5, WINDOW, 33, 64])
@pytest.mark.parametrize("settings", ["DENSE", "K_EQ_V", "GEMMA3"])
def test_a_ring_that_wrapped_equals_growing_views(
    tmp_path: Path, settings: str, chunk: int
) -> None:
    """Rings of `window - 1 + chunk` rows: chunks of 64 never wrap in 40 tokens, chunks of 2 do four times."""
    folder = checkpoints.make(tmp_path, getattr(checkpoints, settings), dtype=torch.float32)
    views = torchtpu_rs.Engine(folder, LIKE, 128)
    ring = torchtpu_rs.Engine(folder, LIKE, 128, prefill_chunk=chunk)
    assert ring.info()["static_shapes"]
    forced = checkpoints.prompt(50, seed=8)
    expected = views.logits(PROMPT, forced)
    torch.testing.assert_close(ring.logits(PROMPT, forced), expected, **TOLERANCE)
    whole = views.logits(PROMPT, all=True)
    torch.testing.assert_close(ring.logits(PROMPT, all=True), whole, **TOLERANCE)
    assert ring.decode(PROMPT, 64, stop=[]).ids == views.decode(PROMPT, 64, stop=[]).ids


def test_a_ring_that_wrapped_equals_one_that_never_does(f32: Path) -> None:
    """The ring's rows beyond the window are masked, so a ring as long as the text is a full cache with a mask."""
    small, large = (torchtpu_rs.Engine(f32, LIKE, 128, prefill_chunk=chunk) for chunk in (2, 121))
    forced = checkpoints.prompt(60, seed=9)
    torch.testing.assert_close(
        small.logits(PROMPT, forced), large.logits(PROMPT, forced), **TOLERANCE
    )


@pytest.mark.parametrize("chunk", [None, 16], ids=["views", "ring"])
@pytest.mark.parametrize("ending", ["stop", "length", "cancelled", "error", "full"])
def test_a_slot_reused_after_any_ending_behaves_like_a_new_one(
    dense: Path, chunk: int | None, ending: str
) -> None:
    def engine() -> torchtpu_rs.Engine:
        return torchtpu_rs.Engine(dense, LIKE, 64, prefill_chunk=chunk)

    used, other = engine(), checkpoints.prompt(50, seed=3)
    if ending == "stop":
        ids = used.decode(other, 5, stop=[]).ids
        assert used.decode(other, 9, stop=ids[2:3]).finish == "stop"
    elif ending == "length":
        assert used.decode(other, 5, stop=[]).finish == "length"
    elif ending == "cancelled":
        assert used.decode(other, 9, stop=[], on_tokens=lambda _: False).finish == "cancelled"
    elif ending == "full":
        assert len(used.decode(other, 99, stop=[]).ids) == 15
    else:
        with pytest.raises(ZeroDivisionError):
            used.decode(other, 9, stop=[], on_tokens=lambda _: 1 // 0)
    assert torch.equal(
        used.logits(PROMPT[:9], PROMPT[9:20]), engine().logits(PROMPT[:9], PROMPT[9:20])
    )


def test_the_same_call_twice_gives_the_same_bits(dense: Path) -> None:
    engine = torchtpu_rs.Engine(dense, LIKE)
    assert torch.equal(engine.logits(PROMPT, PROMPT), engine.logits(PROMPT, PROMPT))
