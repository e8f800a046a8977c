"""Two results side by side: ratios, which way is better, and warnings where they say less than they seem to; and their plot."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import pytest

from bench.load import comparison, plot
from bench.load.figures import Level, Load, Sample
from bench.load.published import Benchmark, Request, Stream
from bench.load.result import Client, Endpoint, Result, Settings
from bench.load.wire import BenchmarkError

if TYPE_CHECKING:
    from pathlib import Path

CLIENT = Client(python="3.11", machine="Linux x86_64", cores=2, versions={}, load_average=0.1)


def level(callers: int, speed: float, failed: int = 0, kind: str = "closed") -> Level:
    """One answer of eleven tokens, so much faster than one of 0.2 s."""
    pieces = tuple((0.1 + 0.01 * index) / speed for index in range(11))
    whole = Sample(number=1, begun=0, ended=0.2 / speed, pieces=pieces, finished=0.2 / speed, tokens=11, rate=100 * speed)  # fmt: skip
    bad = [Sample(number=2 + n, begun=0, ended=0.1, failure="refused") for n in range(failed)]
    load = Load.model_validate({"kind": kind, "size": callers})
    return Level(load=load, seconds=0.2 / speed, client_cpu=0.1, samples=(whole, *bad))


def published(speed: float, timer: str = "engine") -> Benchmark:
    one = {"number": 1, "tokens": 11, "finish": "stop", "client_seconds": 0.2 / speed}
    request = Request.model_validate({**one, "timer": timer, "tokens_per_second": 100 * speed})
    stream = Stream.model_validate(
        {**one, "first_token_seconds": 0.1 / speed, "tokens_per_second": 100 * speed}
    )
    return Benchmark(url="http://x", model="m", requests=(request,), streams=(stream,))


def result(speed: float = 1, **given: Any) -> Result:
    whole: dict[str, Any] = {
        "date": datetime(2026, 12, 1, tzinfo=UTC),
        "complete": True,
        "endpoint": Endpoint(url="http://x", model="m", server="torchtpu-rs"),
        "client": CLIENT,
        "settings": Settings(),
        "published": published(speed),
        "levels": (level(1, speed), level(4, speed)),
    }
    return Result(**(whole | given))


def test_each_figure_has_its_ratio_and_says_which_way_is_better() -> None:
    rows = comparison.rows(result(), result(2))
    assert {row.where for row in rows} == {"one at a time", "streamed", "1 caller", "4 callers"}
    for row in rows:
        assert row.verdict == "better"
        assert row.ratio == pytest.approx(2 if row.higher_is_better else 0.5)
    assert {row.verdict for row in comparison.rows(result(2), result())} == {"worse"}
    assert {row.verdict for row in comparison.rows(result(), result(1.001))} == {""}
    assert not comparison.warnings(result(), result(2))


def test_costs_are_compared_where_both_have_a_price() -> None:
    rows = comparison.rows(result(usd_per_hour=1.2), result(2, usd_per_hour=4.8))
    (cost, _) = [row for row in rows if row.figure == "USD per million tokens"]
    assert cost.ratio == pytest.approx(2)
    assert cost.verdict == "worse"
    rows = comparison.rows(result(usd_per_hour=1.2), result())
    assert "USD per million tokens" not in {row.figure for row in rows}


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"settings": Settings(max_tokens=50)}, "different settings: max_tokens 100 against 50"),
        ({"settings": Settings(fields={"seed": 1})}, "different settings: fields {} against"),
        ({"client": CLIENT.model_copy(update={"cores": 64})}, "different machines: cores 2 against 64"),
        ({"levels": (level(1, 1),)}, "only one of them has 4 callers"),
        ({"levels": (level(1, 1), level(4, 1, failed=2))}, "2 requests of the second failed"),
        ({"complete": False}, "the second is not complete"),
        ({"published": published(1, "client")}, "one of the servers gives no timings"),
    ],
)  # fmt: skip
def test_what_makes_two_results_hard_to_compare_is_said(given: dict[str, Any], says: str) -> None:
    (warning,) = comparison.warnings(result(), result(**given))
    assert says in warning


def test_another_model_is_what_is_compared_and_no_warning() -> None:
    other = result(settings=Settings(model="another"))
    assert not comparison.warnings(result(settings=Settings(model="one")), other)


def test_an_engines_clock_is_not_compared_with_a_clients() -> None:
    rows = comparison.rows(result(), result(published=published(2, "client")))
    assert [row.figure for row in rows if row.where == "one at a time"] == [
        "seconds by the client, median"
    ]


def test_results_are_drawn_the_same_each_time(tmp_path: Path) -> None:
    for name in ("one.svg", "two.svg"):
        plot.draw({"ours": result(2), "theirs": result()}, tmp_path / name)
    drawn = (tmp_path / "one.svg").read_text()
    assert drawn == (tmp_path / "two.svg").read_text()
    for words in ("ours", "theirs", "callers", "First token, ms"):
        assert words in drawn


def test_a_level_without_answers_leaves_a_gap_in_the_plot(tmp_path: Path) -> None:
    empty = Level(load=Load(kind="closed", size=4), seconds=1, client_cpu=0, samples=())
    plot.draw({"ours": result(levels=(level(1, 1), empty))}, tmp_path / "x.svg")
    assert (tmp_path / "x.svg").stat().st_size > 1000


def test_loads_of_two_kinds_are_not_drawn_together(tmp_path: Path) -> None:
    both = {"a": result(), "b": result(levels=(level(1, 1, kind="open"),))}
    with pytest.raises(BenchmarkError, match="of one kind, closed or open, found closed and open"):
        plot.draw(both, tmp_path / "x.svg")
    with pytest.raises(BenchmarkError, match="found none"):
        plot.draw({"a": result(levels=())}, tmp_path / "x.svg")
