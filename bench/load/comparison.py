"""Two results side by side, figure by figure with the ratio, and what makes them hard to compare. Knows files' contents only."""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rich.table import Table

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from pydantic import BaseModel

    from bench.load.figures import Figures
    from bench.load.published import Benchmark
    from bench.load.result import Result

MILLI = 1e3
NO_CHANGE = 0.01


@dataclass(frozen=True)
class Row:
    """A figure of both."""

    where: str
    figure: str
    first: float
    second: float
    higher_is_better: bool = True

    @property
    def ratio(self) -> float | None:
        """The second over the first."""
        return self.second / self.first if self.first else None

    @property
    def verdict(self) -> str:
        """Whether the second is better, in a word; nothing within a percent."""
        if self.ratio is None or abs(self.ratio - 1) < NO_CHANGE:
            return ""
        return "better" if (self.ratio > 1) is self.higher_is_better else "worse"


PUBLISHED: tuple[tuple[str, str, Callable[[Benchmark], list[float]], bool], ...] = (
    (
        "one at a time",
        "seconds by the client, median",
        lambda found: [one.client_seconds for one in found.requests],
        False,
    ),
    (
        "streamed",
        "first token ms, median",
        lambda found: [one.first_token_seconds * MILLI for one in found.streams],
        False,
    ),
    (
        "streamed",
        "tok/s, median",
        lambda found: [one.tokens_per_second for one in found.streams if one.tokens_per_second],
        True,
    ),
)
"""Where, which figure, its values, and whether more is better."""


def rows(first: Result, second: Result) -> list[Row]:
    """Every figure that both have."""
    found: list[Row] = []
    if first.published and second.published:
        found += _published(first.published, second.published)
    others = {level.load: level for level in second.levels}
    for level in first.levels:
        if (other := others.get(level.load)) and level.completed and other.completed:
            found += _level(str(level.load), level.figures, other.figures)
            costs = [
                one.usd_per_million(figures.tokens_per_second)
                for one, figures in ((first, level.figures), (second, other.figures))
            ]
            if costs[0] is not None and costs[1] is not None:
                name = "USD per million tokens"
                found.append(Row(str(level.load), name, costs[0], costs[1], False))
    return found


def _published(first: Benchmark, second: Benchmark) -> Iterator[Row]:
    if first.timer == second.timer:
        name = f"tok/s by the {first.timer}, median"
        yield Row("one at a time", name, first.median, second.median)
    for where, figure, value, higher in PUBLISHED:
        ours, theirs = value(first), value(second)
        if ours and theirs:
            pair = (statistics.median(ours), statistics.median(theirs))
            yield Row(where, figure, *pair, higher_is_better=higher)


def _level(where: str, first: Figures, second: Figures) -> Iterator[Row]:
    yield Row(where, "tok/s", first.tokens_per_second, second.tokens_per_second)
    if (ours := first.request_tokens_per_second) and (theirs := second.request_tokens_per_second):
        yield Row(where, "tok/s each, p50", ours.p50, theirs.p50)
    yield Row(where, "requests/s", first.requests_per_second, second.requests_per_second)
    waits = (first.first_token_seconds, second.first_token_seconds, "first token ms")
    gaps = (first.piece_gap_seconds, second.piece_gap_seconds, "between pieces ms")
    for ours, theirs, name in (waits, gaps):
        if ours and theirs:
            for share in ("p50", "p90", "p99"):
                values = (getattr(ours, share) * MILLI, getattr(theirs, share) * MILLI)
                yield Row(where, f"{name}, {share}", *values, higher_is_better=False)


def warnings(first: Result, second: Result) -> list[str]:
    """Why the ratios may say something else than they seem to."""
    found = [
        f"measured with different settings: {name} {ours!r} against {theirs!r}"
        for name, ours, theirs in _differing(first.settings, second.settings)
        # Which model is what two results may well differ in.
        if name != "model"
    ]
    found += [
        f"measured from different machines: {name} {ours} against {theirs}"
        for name, ours, theirs in _differing(first.client, second.client)
        if name in ("machine", "cores", "python")
    ]
    if first.published and second.published and first.published.timer != second.published.timer:
        found.append(
            "one of the servers gives no timings: rates one at a time are not compared, seconds by the client are"
        )
    loads = [{level.load for level in one.levels} for one in (first, second)]
    found += [f"only one of them has {load}" for load in sorted(map(str, loads[0] ^ loads[1]))]
    counted = [{level.figures.counted for level in one.levels} for one in (first, second)]
    if counted[0] != counted[1] and all(counted):
        found.append("tokens were counted by the server in one, by pieces of text in the other")
    return found + _wanting("first", first) + _wanting("second", second)


def _differing(first: BaseModel, second: BaseModel) -> Iterator[tuple[str, object, object]]:
    for name in type(first).model_fields:
        ours, theirs = getattr(first, name), getattr(second, name)
        if ours != theirs:
            yield name, ours, theirs


def _wanting(name: str, result: Result) -> list[str]:
    found = [] if result.complete else [f"the {name} is not complete"]
    if failed := sum(level.figures.failed for level in result.levels):
        found.append(f"{failed} requests of the {name} failed; rates count whole answers only")
    return found


def table(found: list[Row]) -> Table:
    """For a console."""
    shown = Table(box=None, pad_edge=False, header_style="bold")
    for name in ("load", "figure", "first", "second", "second / first", ""):
        is_number = name in ("first", "second", "second / first")
        shown.add_column(name, justify="right" if is_number else "left", no_wrap=True)
    before = ""
    for row in found:
        ratio = f"{row.ratio:.2f}" if row.ratio is not None else ""
        where = row.where if row.where != before else ""
        shown.add_row(
            where, row.figure, f"{row.first:.4g}", f"{row.second:.4g}", ratio, row.verdict
        )
        before = row.where
    return shown
