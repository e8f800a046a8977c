"""What a level of load measured: each request as it went, and the figures made of them. Knows no wire and no clock."""

from __future__ import annotations

import math
from collections import Counter
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Literal

from pydantic import BaseModel, ConfigDict, computed_field

if TYPE_CHECKING:
    from collections.abc import Sequence


class _Frozen(BaseModel):
    model_config = ConfigDict(frozen=True)


class Load(_Frozen):
    """How hard the endpoint is asked.

    Closed: so many callers, each of whom waits for an answer before asking again, so a slow server is asked less often. Open:
    requests come at a rate whatever the server does, and the time that one waits to be sent counts as the server's.
    """

    kind: Literal["closed", "open"]
    size: float
    """Callers, or requests a second."""

    def __str__(self) -> str:
        if self.kind == "open":
            return f"{self.size:g} requests/s"
        return f"{self.size:g} caller{'s' if self.size != 1 else ''}"


class Sample(_Frozen):
    """One request. Times but `begun` are seconds after it."""

    number: int
    begun: float
    """When it was sent, or was due under an open load, in seconds after the level began."""
    late: float = 0.0
    """How long after it was due it was sent, by fault of this side."""
    ended: float
    failure: str | None = None
    pieces: tuple[float, ...] = ()
    """When each piece of text came."""
    finished: float | None = None
    """When the reason to stop came."""
    finish: str = ""
    tokens: int = 0
    counted: Literal["usage", "pieces"] = "usage"
    """Who counted the tokens: the server, or this side, which sees pieces of text only."""
    rate: float | None = None
    """Tokens after the first, over the seconds after the first."""
    prompt_tokens: int | None = None
    timings: dict[str, Any] | None = None
    """The engine's own, where the server gives them."""
    fingerprint: str | None = None
    """The server's `system_fingerprint`."""


class Spread(_Frozen):
    """Percentiles, interpolated as numpy and vLLM's benchmark do."""

    p50: float
    p90: float
    p99: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread | None:
        """None of nothing."""
        if not values:
            return None
        ordered = sorted(values)
        return cls(**{name: _percentile(ordered, share) for name, share in _SHARES.items()})


_SHARES = {"p50": 0.5, "p90": 0.9, "p99": 0.99}


def _percentile(ordered: Sequence[float], share: float) -> float:
    place = share * (len(ordered) - 1)
    below = math.floor(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (place - below)


class Level(_Frozen):
    """One load, and everything that happened under it. The requests that warmed up are not in it."""

    load: Load
    seconds: float
    """From the first request to the end of the last."""
    client_cpu: float
    """Share of one core that this side was busy; near 1, its own work is in the latencies."""
    samples: tuple[Sample, ...]

    @property
    def completed(self) -> list[Sample]:
        """Those that were answered whole."""
        return [one for one in self.samples if one.failure is None]

    @computed_field  # type: ignore[prop-decorator]
    @property
    def figures(self) -> Figures:
        """Made of the samples, and written with them."""
        return Figures.of(self)


class Figures(_Frozen):
    """Of a level. Seconds, and rates a second; None where nothing was completed."""

    completed: int
    failed: int
    failures: dict[str, int]
    """How often each reason."""
    tokens: int
    counted: Literal["usage", "pieces", "both"]
    tokens_per_second: float
    """All tokens of answers that were whole, over all seconds of the level."""
    requests_per_second: float
    request_tokens_per_second: Spread | None
    """Of each request: its tokens after the first, over the seconds after the first."""
    first_token_seconds: Spread | None
    piece_gap_seconds: Spread | None
    """Inter-token latency as a reader sees it: between two pieces of text, of all requests together."""
    tokens_per_piece: float | None
    request_seconds: Spread | None
    late_seconds: float
    """The longest that this side was behind an open load's schedule."""

    @classmethod
    def of(cls, level: Level) -> Figures:
        """The figures of one level."""
        done = level.completed
        tokens = sum(one.tokens for one in done)
        pieces = sum(len(one.pieces) for one in done)
        counted = {one.counted for one in done}
        gaps = [after - before for one in done for before, after in pairwise(one.pieces)]
        return cls(
            completed=len(done),
            failed=len(level.samples) - len(done),
            failures=dict(Counter(one.failure for one in level.samples if one.failure)),
            tokens=tokens,
            counted="both" if len(counted) > 1 else next(iter(counted), "usage"),
            tokens_per_second=tokens / level.seconds if level.seconds else 0.0,
            requests_per_second=len(done) / level.seconds if level.seconds else 0.0,
            request_tokens_per_second=Spread.of([one.rate for one in done if one.rate]),
            first_token_seconds=Spread.of([one.pieces[0] for one in done]),
            piece_gap_seconds=Spread.of(gaps),
            tokens_per_piece=tokens / pieces if pieces else None,
            request_seconds=Spread.of([one.ended for one in done]),
            late_seconds=max((one.late for one in level.samples), default=0.0),
        )
