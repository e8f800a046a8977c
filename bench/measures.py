"""What one process of a benchmark measures, whichever engine runs in it.

Knows no engine and imports the standard library only, so that it runs in the environments of peers too. The
process reads a `Job` as JSON from its standard input and prints its figures as JSON on the last line.
"""

import contextlib
import dataclasses
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from typing import Protocol

LONG_SECONDS = 20


class Engine(Protocol):
    """A loaded model, as far as benchmarks are concerned."""

    def prefill(self, ids: list[int]) -> None:
        """Reads the prompt `ids`, from nothing, and chooses the token after it."""

    def decode_seconds(self, ids: list[int], tokens: int) -> float:
        """Reads the prompt `ids`, then makes `tokens` more after the first: the seconds that these took."""


@dataclasses.dataclass(frozen=True)
class Job:
    """What to measure; the keys of `prefill` and `decode` name the results, the values are prompts."""

    checkpoint: str
    first: list[int]
    """The prompt of the first token after the load."""
    prefill: dict[str, list[int]]
    decode: dict[str, list[int]]
    decode_tokens: int
    context: int
    begun: float = 0.0
    """`time.monotonic()` when the process was started; the clock is the whole machine's."""


def seconds(run: Callable[[], object]) -> float:
    """The median time of three runs; of fewer if they take long, on CPUs without bfloat16 instructions."""
    times: list[float] = []
    while len(times) < 3 and sum(times) < LONG_SECONDS:
        begun = time.perf_counter()
        run()
        times.append(time.perf_counter() - begun)
    return statistics.median(times)


def measure(load: Callable[[Job], Engine], job: Job) -> dict[str, float]:
    """Loads the engine and measures it; rates are tokens per second."""
    begun = time.monotonic()
    engine = load(job)
    loaded = time.monotonic()
    engine.prefill(job.first)
    first = time.monotonic()
    result = {
        "load_seconds": loaded - begun,
        "first_token_seconds": first - loaded,
        "load_to_first_seconds": first - begun,
        "start_to_first_seconds": first - job.begun,
    }
    for key, ids in job.prefill.items():
        result[key] = len(ids) / seconds(lambda ids=ids: engine.prefill(ids))  # type: ignore[misc]
    for key, ids in job.decode.items():
        result[key] = job.decode_tokens / engine.decode_seconds(ids, job.decode_tokens)
    return result


def main(load: Callable[[Job], Engine]) -> None:
    """The body of a process: job in, figures out. What engines print goes to the standard error."""
    job = Job(**json.loads(sys.stdin.read()))
    with contextlib.redirect_stdout(sys.stderr):
        figures = measure(load, job)
    print(json.dumps(figures), flush=True)
    # Engines' own threads and exit hooks are not measured, and some never return.
    os._exit(0)
