"""What a person sees of a run: the published lines as they come, and the load as a table that lives while it is measured.

On a terminal the table is redrawn; elsewhere each level is a line when it is over.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

from rich.live import Live
from rich.table import Table

from bench.load.published import Request, rates, streamed
from bench.load.sweep import requests_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rich.console import Console

    from bench.load.figures import Figures, Level, Spread
    from bench.load.published import Benchmark, Stream
    from bench.load.result import Endpoint, Result, Settings
    from bench.load.sweep import Running

# A redraw takes some milliseconds, in which no arrival is timed.
REDRAWN_PER_SECOND = 1
BUSY = 0.7
# All of it fits into 80 columns.
COLUMNS = (
    "load",
    "done",
    "failed",
    "tok/s\nall",
    "tok/s\neach",
    "req/s",
    "first token ms\np50/p90/p99",
    "pieces ms\np50/p99",
)


class Display:
    """One run on one console."""

    def __init__(self, console: Console, settings: Settings) -> None:
        self._console = console
        self._settings = settings
        self._requests: list[Request] = []
        self._levels: list[Level] = []
        self._running: Running | None = None
        self._live: Live | None = None

    def endpoint(self, endpoint: Endpoint) -> None:
        """What is measured."""
        self._say(str(endpoint))

    def request(self, one: Request | Stream) -> None:
        """An answer of the published protocol, and the line under the requests when they are over."""
        if isinstance(one, Request):
            self._requests.append(one)
        elif self._requests:
            self._say(rates(self._requests))
            self._requests.clear()
        self._say(str(one))

    def published(self, found: Benchmark) -> None:
        """The published protocol is over."""
        self._say(streamed(found.streams))

    @contextlib.contextmanager
    def load(self) -> Iterator[None]:
        """Around the load protocol."""
        self._say(method(self._settings))
        if not self._console.is_terminal:
            yield
            return
        with Live(
            console=self._console,
            get_renderable=self._table,
            refresh_per_second=REDRAWN_PER_SECOND,
        ) as self._live:
            yield
            self._running = None

    def begins(self, running: Running) -> None:
        """A level is about to be measured."""
        self._running = running

    def level(self, level: Level) -> None:
        """A level is over."""
        self._levels.append(level)
        self._running = None
        if self._live is None:
            self._say(line(level))

    def ends(self, result: Result) -> None:
        """What is to be known besides: failures, costs, and what makes the figures doubtful."""
        for text in notes(result):
            self._say(text)

    def _say(self, text: str) -> None:
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)

    def _table(self) -> Table:
        table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0), header_style="bold")
        for column in COLUMNS:
            table.add_column(column, justify="left" if column == "load" else "right", no_wrap=True)
        for level in self._levels:
            table.add_row(str(level.load), *_cells(level.figures))
        if running := self._running:
            figures = running.level().figures
            of = requests_of(running.load, self._settings)
            state = "warm-up" if running.warming_up else f"{running.running} running"
            cells = _cells(figures)
            cells[0] += f" of {of}" if of else ""
            table.add_row(f"{running.load}, {state}", *cells, style="dim")
        return table


def method(settings: Settings) -> str:
    """How the load is made, in a sentence."""
    if settings.rates:
        return (
            "load: open loop, requests come at random times at the rate whatever the server does; "
            "times count from when a request was due"
        )
    return "load: closed loop, each caller waits for an answer before asking again; what callers would do meanwhile is not in it"


def line(level: Level) -> str:
    """A level in one line."""
    figures = level.figures
    text = f"{level.load}: {figures.completed} done, {figures.failed} failed"
    if not figures.completed:
        return text
    each = figures.request_tokens_per_second
    parts = [
        f"{figures.tokens_per_second:.1f} tok/s",
        f"{each.p50:.1f} tok/s each" if each else "",
        f"{figures.requests_per_second:.2f} requests/s",
        f"first token {_three(figures.first_token_seconds)} ms (p50/p90/p99)",
        f"between pieces {_two(figures.piece_gap_seconds)} ms (p50/p99)",
    ]
    return ", ".join([text, *filter(None, parts)])


def notes(result: Result) -> list[str]:
    """What a reader of the figures should know."""
    found = [
        f"{level.load}: {count} failed: {reason}"
        for level in result.levels
        for reason, count in level.figures.failures.items()
    ]
    counted = {level.figures.counted for level in result.levels} - {"usage"}
    if counted:
        found.append(
            "tokens are pieces of text as this side saw them: the server gives no usage in streams"
        )
    if (busy := max((level.client_cpu for level in result.levels), default=0)) > BUSY:
        found.append(
            f"this side was busy {busy:.0%} of a core: its own work is in the latencies; measure from another machine"
        )
    if (late := max((one.figures.late_seconds for one in result.levels), default=0)) > 0.1:
        found.append(
            f"this side sent a request {late:.1f} s after it was due; the wait is in the latencies"
        )
    found += _costs(result)
    if not result.complete:
        found.append("not complete: the run ended before its last level")
    return found


def _costs(result: Result) -> list[str]:
    rates = [("one at a time", result.published.median)] if result.published else []
    rates += [(str(level.load), level.figures.tokens_per_second) for level in result.levels]
    return [
        f"{name}: USD {usd:.2f} per million output tokens"
        for name, rate in rates
        if (usd := result.usd_per_million(rate)) is not None
    ]


def _cells(figures: Figures) -> list[str]:
    each = figures.request_tokens_per_second
    return [
        str(figures.completed),
        str(figures.failed),
        f"{figures.tokens_per_second:.1f}" if figures.completed else "",
        f"{each.p50:.1f}" if each else "",
        f"{figures.requests_per_second:.2f}" if figures.completed else "",
        _three(figures.first_token_seconds),
        _two(figures.piece_gap_seconds),
    ]


def _three(spread: Spread | None) -> str:
    if spread is None:
        return ""
    return f"{spread.p50 * 1e3:.0f}/{spread.p90 * 1e3:.0f}/{spread.p99 * 1e3:.0f}"


def _two(spread: Spread | None) -> str:
    return f"{spread.p50 * 1e3:.1f}/{spread.p99 * 1e3:.1f}" if spread else ""
