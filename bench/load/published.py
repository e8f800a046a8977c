"""The published rig's protocol: one prompt five times, one at a time, then eight prompts streamed.

Of each request there are two times: the engine's own, where the server gives `timings`, and this side's clock. Knows no cloud.
"""

from __future__ import annotations

import asyncio
import statistics
from typing import TYPE_CHECKING, Any, Literal

import httpx
from pydantic import BaseModel, ConfigDict

from bench.load import wire
from bench.load.wire import Ask, BenchmarkError, UnansweredError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

PROMPT = "Write a short paragraph about the ocean."
REQUESTS, MAX_TOKENS = 5, 100
PROMPTS = (
    PROMPT,
    "What is a TPU? Two sentences.",
    "Name three uses of copper.",
    "Why is the sky blue?",
    "Give a recipe for pancakes in five lines.",
    "Explain recursion to a child.",
    "What is the difference between weather and climate?",
    "Write four lines about autumn.",
)
# A TPU that decodes 12 tokens a second needs nine for a request; the first after a start may compile.
TIMEOUT_SECONDS = 300.0


class _Measured(BaseModel):
    model_config = ConfigDict(frozen=True)

    number: int
    """From 1."""
    tokens: int
    finish: str
    client_seconds: float
    """From sending to the last byte, by this side's clock."""


class Request(_Measured):
    """One whole answer."""

    timer: Literal["engine", "client"] = "engine"
    """Whose clock the rate is by: the client's for a server that gives no timings."""
    read_seconds: float | None = None
    decode_seconds: float | None = None
    tokens_per_second: float
    """By the engine's timer: tokens after the first, over the seconds of decoding. By the client's: tokens over all seconds."""

    def __str__(self) -> str:
        begun = f"request {self.number}: {self.tokens} tokens, finish {self.finish}, "
        rate = f"{self.tokens_per_second:.2f} tok/s"
        if self.read_seconds is None or self.decode_seconds is None:
            return f"{begun}client {self.client_seconds:.2f} s, {rate} by the client"
        times = f"read {self.read_seconds:.3f} s, decode {self.decode_seconds:.3f} s"
        return f"{begun}{times}, {rate}, client {self.client_seconds:.2f} s"


class Stream(_Measured):
    """One streamed answer, as the client sees it."""

    first_token_seconds: float
    tokens_per_second: float | None
    """Tokens after the first, over the seconds after the first, as vLLM's benchmark counts; None where there is one only."""

    def __str__(self) -> str:
        rate = f"{self.tokens_per_second:.1f} tok/s" if self.tokens_per_second else "one token"
        return (
            f"stream {self.number}: {self.tokens} tokens, finish {self.finish}, "
            f"first token {self.first_token_seconds:.3f} s, {rate}"
        )


class Benchmark(BaseModel):
    """Everything that was measured."""

    model_config = ConfigDict(frozen=True)

    url: str
    model: str
    requests: tuple[Request, ...]
    streams: tuple[Stream, ...]

    @property
    def timer(self) -> Literal["engine", "client"]:
        """Whose clock the rates of the requests are by."""
        return self.requests[0].timer

    @property
    def median(self) -> float:
        """Tokens a second of the requests, by `timer`."""
        return statistics.median(one.tokens_per_second for one in self.requests)

    def lines(self) -> list[str]:
        """The published form."""
        lines = [*map(str, self.requests), rates(self.requests), *map(str, self.streams)]
        return [*lines, streamed(self.streams)] if self.streams else lines


def rates(requests: Sequence[Request]) -> str:
    """The line under the requests."""
    found = [one.tokens_per_second for one in requests]
    figures = f"{statistics.median(found):.2f}, min {min(found):.2f}, max {max(found):.2f}"
    if requests[0].timer == "engine":
        return f"median decode tok/s {figures}"
    return f"median tok/s {figures}, by the client: the server gives no timings"


def streamed(streams: Sequence[Stream]) -> str:
    """The line under the streams."""
    first = [one.first_token_seconds for one in streams]
    seen = [one.tokens_per_second for one in streams if one.tokens_per_second]
    text = f"streamed: first token {min(first):.3f} to {max(first):.3f} s"
    return f"{text}, {min(seen):.1f} to {max(seen):.1f} tok/s" if seen else text


def usd_per_million_tokens(usd_per_hour: float, tokens_per_second: float) -> float:
    """What a million output tokens cost at that rate."""
    return usd_per_hour / 3600 / tokens_per_second * 1e6


def run(
    url: str,
    api_key: str | None,
    *,
    on_request: Callable[[Request | Stream], object] | None = None,
    requests: int = REQUESTS,
    max_tokens: int = MAX_TOKENS,
    prompts: Sequence[str] = PROMPTS,
) -> Benchmark:
    """The whole protocol; `on_request` hears of each answer, and what it raises ends the run. Not for a thread with an event loop.

    Raises:
        BenchmarkError: the endpoint does not answer, or refuses, or what it answers cannot be measured.
    """

    async def all_of_it() -> Benchmark:
        async with wire.client(url, api_key) as client:
            return await measure(
                client, Ask(max_tokens), on_request, requests=requests, prompts=prompts
            )

    return asyncio.run(all_of_it())


async def measure(
    client: httpx.AsyncClient,
    ask: Ask,
    on_request: Callable[[Request | Stream], object] | None = None,
    *,
    requests: int = REQUESTS,
    prompt: str = PROMPT,
    prompts: Sequence[str] = PROMPTS,
    timeout_seconds: float = TIMEOUT_SECONDS,
) -> Benchmark:
    """The same with a client that is there.

    Raises:
        BenchmarkError: as `run`.
    """
    whole: list[Request] = []
    streams: list[Stream] = []
    model = ""
    url = str(client.base_url).rstrip("/")
    try:
        for number in range(1, requests + 1):
            async with asyncio.timeout(timeout_seconds):
                body, seconds = await wire.whole(client, ask, prompt)
            model, one = _request(body, number, seconds)
            whole.append(one)
            if on_request:
                on_request(one)
        for number, text in enumerate(prompts, 1):
            async with asyncio.timeout(timeout_seconds):
                streams.append(_stream(await wire.stream(client, ask, text), number))
            if on_request:
                on_request(streams[-1])
    except TimeoutError as error:
        raise BenchmarkError(
            f"expected a whole answer from {url} within {timeout_seconds:.0f} s, found none"
        ) from error
    except httpx.TransportError as error:
        raise UnansweredError(
            f"expected an answer from {url}, found {type(error).__name__} ({error})"
        ) from error
    return Benchmark(url=url, model=model, requests=tuple(whole), streams=tuple(streams))


def _request(body: Any, number: int, seconds: float) -> tuple[str, Request]:
    try:
        finish = str(body["choices"][0]["finish_reason"])
        if not (timings := body.get("timings")):
            tokens = int(body["usage"]["completion_tokens"])
            return str(body["model"]), Request(
                number=number,
                tokens=tokens,
                finish=finish,
                client_seconds=seconds,
                timer="client",
                tokens_per_second=tokens / seconds,
            )
        tokens, decode = int(timings["predicted_n"]), timings["predicted_ms"] / 1000
        return str(body["model"]), Request(
            number=number,
            tokens=tokens,
            finish=finish,
            client_seconds=seconds,
            read_seconds=timings["prompt_ms"] / 1000,
            decode_seconds=decode,
            # Not the server's own rate: some divide all tokens by the time of those after the first.
            tokens_per_second=(tokens - 1) / decode if decode > 0 else 0.0,
        )
    except (ValueError, KeyError, TypeError, IndexError, AttributeError) as error:
        raise BenchmarkError(
            f"expected a chat completion with usage or timings, found {str(body)[: wire.SHOWN]}"
        ) from error


def _stream(found: wire.Streamed, number: int) -> Stream:
    return Stream(
        number=number,
        tokens=found.tokens,
        finish=found.finish,
        client_seconds=found.ended,
        first_token_seconds=found.first,
        tokens_per_second=found.rate,
    )
