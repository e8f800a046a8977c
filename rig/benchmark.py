"""How fast an endpoint answers, by the published rig's protocol: one prompt five times, one at a time, then eight prompts streamed.

Of each request there are two times: the engine's own, which the server gives as `timings`, and this side's clock. Knows no cloud.
"""

from __future__ import annotations

import json
import statistics
import time
from typing import TYPE_CHECKING, Any

import httpx
from pydantic import BaseModel, ConfigDict

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

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


class BenchmarkError(RuntimeError):
    """The endpoint did not answer as one that can be measured; the text says what it did."""


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

    read_seconds: float
    decode_seconds: float
    tokens_per_second: float
    """By the engine's own timer: tokens after the first, over the seconds of decoding."""

    def __str__(self) -> str:
        return (
            f"request {self.number}: {self.tokens} tokens, finish {self.finish}, read {self.read_seconds:.3f} s, "
            f"decode {self.decode_seconds:.3f} s, {self.tokens_per_second:.2f} tok/s, client {self.client_seconds:.2f} s"
        )


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
    def median(self) -> float:
        """Tokens a second, by the engine's timer."""
        return statistics.median(one.tokens_per_second for one in self.requests)

    def lines(self) -> list[str]:
        """The published form."""
        rates = [one.tokens_per_second for one in self.requests]
        lines = [str(one) for one in self.requests]
        lines.append(
            f"median decode tok/s {self.median:.2f}, min {min(rates):.2f}, max {max(rates):.2f}"
        )
        if not self.streams:
            return lines
        lines += [str(one) for one in self.streams]
        first = [one.first_token_seconds for one in self.streams]
        seen = [one.tokens_per_second for one in self.streams if one.tokens_per_second]
        text = f"streamed: first token {min(first):.3f} to {max(first):.3f} s"
        return [*lines, f"{text}, {min(seen):.1f} to {max(seen):.1f} tok/s" if seen else text]


def usd_per_million_tokens(usd_per_hour: float, tokens_per_second: float) -> float:
    """What a million output tokens cost at that rate, one request at a time."""
    return usd_per_hour / 3600 / tokens_per_second * 1e6


def run(
    url: str,
    api_key: str | None,
    *,
    on_request: Callable[[Request | Stream], object] | None = None,
    requests: int = REQUESTS,
    max_tokens: int = MAX_TOKENS,
    prompts: tuple[str, ...] = PROMPTS,
) -> Benchmark:
    """The whole protocol; `on_request` hears of each answer, and what it raises ends the run.

    Raises:
        BenchmarkError: the endpoint does not answer, refuses, or gives no timings.
    """
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    whole: list[Request] = []
    streams: list[Stream] = []
    model = ""
    with httpx.Client(base_url=url, headers=headers, timeout=TIMEOUT_SECONDS) as client:
        try:
            for number in range(1, requests + 1):
                model, one = _whole(client, number, max_tokens)
                whole.append(one)
                if on_request:
                    on_request(one)
            for number, prompt in enumerate(prompts, 1):
                streams.append(_streamed(client, number, prompt, max_tokens))
                if on_request:
                    on_request(streams[-1])
        except httpx.TransportError as error:
            raise BenchmarkError(
                f"expected an answer from {url}, found {type(error).__name__} ({error}); `torchtpu-rig check` tells which hop fails"
            ) from error
    return Benchmark(url=url, model=model, requests=tuple(whole), streams=tuple(streams))


def _whole(client: httpx.Client, number: int, max_tokens: int) -> tuple[str, Request]:
    begun = time.perf_counter()
    answer = client.post("/v1/chat/completions", json=_body(PROMPT, max_tokens))
    seconds = time.perf_counter() - begun
    _refused(answer)
    try:
        body = answer.json()
        timings, choice = body["timings"], body["choices"][0]
        return str(body["model"]), Request(
            number=number,
            tokens=timings["predicted_n"],
            finish=choice["finish_reason"],
            client_seconds=seconds,
            read_seconds=timings["prompt_ms"] / 1000,
            decode_seconds=timings["predicted_ms"] / 1000,
            tokens_per_second=timings["predicted_per_second"],
        )
    except (ValueError, KeyError, TypeError, IndexError) as error:
        raise BenchmarkError(
            f"expected an answer with the engine's timings, as torchtpu-rs gives them, found none in {answer.text[:200]!r}"
        ) from error


def _streamed(client: httpx.Client, number: int, prompt: str, max_tokens: int) -> Stream:
    body = _body(prompt, max_tokens) | {"stream": True, "stream_options": {"include_usage": True}}
    first: float | None = None
    last, tokens, finish = 0.0, 0, ""
    begun = time.perf_counter()
    with client.stream("POST", "/v1/chat/completions", json=body) as answer:
        if not answer.is_success:
            answer.read()
        _refused(answer)
        for text, finished, counted in _chunks(answer):
            if text:
                last = time.perf_counter() - begun
                first = last if first is None else first
            finish, tokens = finished or finish, counted or tokens
    seconds = time.perf_counter() - begun
    if first is None:
        raise BenchmarkError(f"expected text in answer to {prompt!r}, found none")
    # The token that ends a turn is counted and never seen.
    seen = tokens - (finish == "stop")
    rate = (seen - 1) / (last - first) if seen > 1 and last > first else None
    return Stream(
        number=number,
        tokens=tokens,
        finish=finish,
        client_seconds=seconds,
        first_token_seconds=first,
        tokens_per_second=rate,
    )


def _chunks(answer: httpx.Response) -> Iterator[tuple[str, str, int]]:
    """Of each chunk its text, its finish reason and its count of tokens, where it has them."""
    for line in answer.iter_lines():
        if not line.startswith("data: "):
            continue
        data = line.removeprefix("data: ")
        if data == "[DONE]":
            return
        try:
            chunk = json.loads(data)
            if "error" in chunk:
                raise BenchmarkError(f"expected a whole stream, found {chunk['error']['message']}")
            choice = chunk["choices"][0] if chunk["choices"] else {"delta": {}}
            delta, counted = choice["delta"], chunk.get("usage") or {"completion_tokens": 0}
            text = delta.get("content") or delta.get("reasoning_content") or ""
            yield text, choice.get("finish_reason") or "", counted["completion_tokens"]
        except (ValueError, KeyError, TypeError) as error:
            raise BenchmarkError(
                f"expected a chunk of a chat completion, found {data[:200]!r}"
            ) from error
    raise BenchmarkError("expected a stream that ends with [DONE], found one that was cut")


def _body(prompt: str, max_tokens: int) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": prompt}], "max_tokens": max_tokens}


def _refused(answer: httpx.Response) -> None:
    if answer.is_success:
        return
    try:
        message = answer.json()["error"]["message"]
    except (ValueError, KeyError, TypeError):
        message = answer.text[:200]
    raise BenchmarkError(f"expected an answer, found HTTP {answer.status_code}: {message}")
