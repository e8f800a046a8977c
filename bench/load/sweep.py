"""The load protocol: levels of load in turn, each warmed up first. Streams all; keeps what failed, with the reason.

Knows the wire and the clock; what is made of the samples is figures.py's.
"""

from __future__ import annotations

import asyncio
import itertools
import random
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import httpx

from bench.load import wire
from bench.load.figures import Level, Load, Sample
from bench.load.wire import BenchmarkError, RefusedError

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterator

    from bench.load.result import Settings

# A caller who was refused comes again after a while: without it a server that refuses is asked thousands of times a second.
PAUSE_SECONDS, LONGEST_PAUSE_SECONDS = 0.25, 5.0
PER_CALLER, FEWEST = 4, 8
OPEN_REQUESTS = 32
MICROSECOND = 6
"""Digits that are kept: a clock of this side is no better."""


@dataclass
class Running:
    """A level as it runs, for those who watch."""

    load: Load
    warming_up: bool = True
    running: int = 0
    samples: list[Sample] = field(default_factory=list)
    begun: float = 0.0
    """By `time.perf_counter`."""

    def __post_init__(self) -> None:
        self.begun = time.perf_counter()

    def level(self, cpu: float = 0.0) -> Level:
        """What was measured until here."""
        return Level(
            load=self.load,
            # Not until now: the pause after a refusal is nobody's time.
            seconds=max((one.begun + one.ended for one in self.samples), default=0.0),
            client_cpu=cpu,
            samples=tuple(self.samples),
        )


async def sweep(
    client: httpx.AsyncClient,
    settings: Settings,
    on_level: Callable[[Running], object] = lambda _: None,
) -> AsyncIterator[Level]:
    """Each level when it is over; `on_level` hears of it when it begins. Ends after a level in which nothing was completed."""
    asked = _Asked(client, settings)
    for load in settings.loads():
        running = Running(load)
        on_level(running)
        level = await asked.level(running)
        yield level
        if not level.completed:
            return


def requests_of(load: Load, settings: Settings) -> int | None:
    """How many requests a level has; None where it has a duration."""
    if settings.duration_seconds is not None:
        return None
    if settings.requests_per_level is not None:
        return settings.requests_per_level
    return OPEN_REQUESTS if load.kind == "open" else max(FEWEST, PER_CALLER * int(load.size))


class _Asked:
    """One endpoint, asked as the settings say."""

    def __init__(self, client: httpx.AsyncClient, settings: Settings) -> None:
        self._client = client
        self._settings = settings
        self._ask = settings.ask()
        self._prompts = itertools.cycle(settings.prompts)

    async def level(self, running: Running) -> Level:
        """Warm up, forget, measure."""
        load, settings = running.load, self._settings
        callers = int(load.size) if load.kind == "closed" else 1
        if settings.warmup:
            await self._closed(Running(load), callers, count=callers * settings.warmup)
        running.warming_up = False
        running.begun, cpu = time.perf_counter(), time.process_time()
        count = requests_of(load, settings)
        if load.kind == "closed":
            await self._closed(running, callers, count)
        else:
            await self._open(running, load.size, count)
        seconds = time.perf_counter() - running.begun
        return running.level(round((time.process_time() - cpu) / seconds, 3))

    async def _closed(self, running: Running, callers: int, count: int | None) -> None:
        numbers = itertools.count(1) if count is None else iter(range(1, count + 1))
        async with asyncio.TaskGroup() as group:
            for _ in range(callers):
                group.create_task(self._caller(running, numbers))

    async def _caller(self, running: Running, numbers: Iterator[int]) -> None:
        """One who asks, waits for the answer and asks again."""
        for number in numbers:
            now = time.perf_counter()
            if self._over(now - running.begun):
                return
            if pause := await self._one(running, number, due=now):
                await asyncio.sleep(pause)

    async def _open(self, running: Running, rate: float, count: int | None) -> None:
        # A Poisson process, as vLLM's benchmark has by default; the same seed gives the same times.
        chance = random.Random(self._settings.seed)
        due = running.begun
        async with asyncio.TaskGroup() as group:
            for number in itertools.count(1) if count is None else range(1, count + 1):
                if self._over(due - running.begun):
                    return
                await asyncio.sleep(max(0.0, due - time.perf_counter()))
                group.create_task(self._one(running, number, due))
                due += chance.expovariate(rate)

    def _over(self, seconds: float) -> bool:
        limit = self._settings.duration_seconds
        return limit is not None and seconds >= limit

    async def _one(self, running: Running, number: int, due: float) -> float:
        """Asks once and keeps what came of it; how long the caller should stay away."""
        late = time.perf_counter() - due
        running.running += 1
        pause = 0.0
        try:
            async with asyncio.timeout(self._settings.timeout_seconds):
                found = await wire.stream(self._client, self._ask, next(self._prompts))
        except (BenchmarkError, httpx.TransportError, TimeoutError) as error:
            pause = _pause(error)
            sample = Sample(
                number=number,
                begun=_rounded(due - running.begun),
                late=_rounded(late),
                ended=_rounded(time.perf_counter() - due),
                failure=self._reason(error),
            )
        else:
            sample = _sample(found, number, due - running.begun, late)
        finally:
            running.running -= 1
        running.samples.append(sample)
        return pause

    def _reason(self, error: Exception) -> str:
        if isinstance(error, TimeoutError):
            return f"no whole answer within {self._settings.timeout_seconds:g} s"
        if isinstance(error, httpx.TransportError):
            return f"{type(error).__name__}: {error}".rstrip(": ")
        return str(error)


def _pause(error: Exception) -> float:
    wanted = error.retry_after if isinstance(error, RefusedError) else None
    return min(max(wanted or 0.0, PAUSE_SECONDS), LONGEST_PAUSE_SECONDS)


def _sample(found: wire.Streamed, number: int, begun: float, late: float) -> Sample:
    # From when it was due: a wait on this side is one that a caller would have had.
    usage = found.usage or {}
    return Sample(
        number=number,
        begun=_rounded(begun),
        late=_rounded(late),
        ended=_rounded(late + found.ended),
        pieces=tuple(_rounded(late + at) for at in found.pieces),
        finished=_rounded(late + found.finished),
        finish=found.finish,
        tokens=found.tokens,
        counted="usage" if found.usage else "pieces",
        rate=found.rate,
        prompt_tokens=usage.get("prompt_tokens"),
        timings=dict(found.timings) if found.timings else None,
        fingerprint=found.fingerprint,
    )


def _rounded(seconds: float) -> float:
    return round(seconds, MICROSECOND)
