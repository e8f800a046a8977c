"""The figures of a level, from requests with known times."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest

from bench.load.figures import Level, Load, Sample, Spread


def sample(number: int, **given: Any) -> Sample:
    """Eleven tokens: the first after 0.1 s, one every 0.01 s."""
    pieces = tuple(round(0.1 + 0.01 * index, 6) for index in range(11))
    whole: dict[str, Any] = {
        "begun": 0.0,
        "ended": 0.2,
        "pieces": pieces,
        "finished": 0.2,
        "tokens": 11,
        "rate": 100.0,
    }
    return Sample(number=number, **(whole | given))


def level(*samples: Sample, seconds: float = 1.0) -> Level:
    return Level(load=Load(kind="closed", size=2), seconds=seconds, client_cpu=0.1, samples=samples)


def test_percentiles_are_interpolated_as_numpy_does() -> None:
    found = Spread.of([4.0, 1.0, 3.0, 2.0])
    assert found is not None
    assert (found.p50, found.p90, found.p99) == pytest.approx((2.5, 3.7, 3.97))
    one = Spread.of([7.0])
    assert one is not None
    assert (one.p50, one.p99) == (7.0, 7.0)
    assert Spread.of([]) is None


def test_figures_count_whole_answers_over_all_seconds() -> None:
    figures = level(sample(1), sample(2, begun=0.3), seconds=0.5).figures
    assert (figures.completed, figures.failed, figures.tokens) == (2, 0, 22)
    assert figures.tokens_per_second == pytest.approx(44)
    assert figures.requests_per_second == pytest.approx(4)
    assert figures.first_token_seconds is not None
    assert figures.first_token_seconds.p99 == pytest.approx(0.1)
    assert figures.piece_gap_seconds is not None
    assert figures.piece_gap_seconds.p50 == pytest.approx(0.01)
    assert figures.request_tokens_per_second is not None
    assert figures.request_tokens_per_second.p50 == 100
    assert figures.tokens_per_piece == 1


def test_gaps_lie_within_a_request_and_are_taken_together() -> None:
    slow = sample(2, pieces=(0.5, 0.6), tokens=2)
    figures = level(sample(1), slow).figures
    gaps = [b - a for one in (sample(1), slow) for a, b in pairwise(one.pieces)]
    assert figures.piece_gap_seconds == Spread.of(gaps)
    assert len(gaps) == 11


def test_what_failed_is_counted_by_its_reason_and_is_in_no_rate() -> None:
    failed = [
        Sample(number=n, begun=0, ended=0.1, failure=why)
        for n, why in ((2, "a"), (3, "b"), (4, "a"))
    ]
    figures = level(sample(1), *failed).figures
    assert (figures.completed, figures.failed, figures.failures) == (1, 3, {"a": 2, "b": 1})
    assert figures.tokens_per_second == 11
    assert figures.requests_per_second == 1


def test_a_level_in_which_nothing_came_has_no_latencies() -> None:
    figures = level(Sample(number=1, begun=0, ended=0.1, failure="a")).figures
    assert (figures.tokens_per_second, figures.first_token_seconds, figures.piece_gap_seconds) == (
        0,
        None,
        None,
    )
    assert level(seconds=0).figures.completed == 0


def test_who_counted_the_tokens_is_told() -> None:
    by_pieces = sample(2, counted="pieces")
    assert level(sample(1)).figures.counted == "usage"
    assert level(by_pieces).figures.counted == "pieces"
    assert level(sample(1), by_pieces).figures.counted == "both"


def test_a_level_that_is_written_is_read_back_the_same_with_its_figures_beside() -> None:
    written = level(sample(1)).model_dump(mode="json")
    assert written["figures"]["tokens"] == 11
    assert Level.model_validate(written) == level(sample(1))
    assert [str(Load(kind="closed", size=n)) for n in (1, 8)] == ["1 caller", "8 callers"]
    assert str(Load(kind="open", size=0.5)) == "0.5 requests/s"
