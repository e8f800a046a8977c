"""One chat request to an OpenAI endpoint: what is sent, what came back, and when, by this side's clock.

Knows the wire of torchtpu-rs, llama.cpp's server and vLLM, which differ in what they add. Knows no protocol of measuring.
"""

from __future__ import annotations

import json
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import httpx

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Mapping

PATH = "/v1/chat/completions"
# A server that thinks, or that keeps its thoughts apart, says so by other names.
TEXTS = ("content", "reasoning_content", "reasoning")
SHOWN = 200


class BenchmarkError(RuntimeError):
    """The endpoint did not answer as one that can be measured; the text says what it did."""


class UnansweredError(BenchmarkError):
    """Nobody answers at the address, or the connection broke."""


class RefusedError(BenchmarkError):
    """The endpoint answered with an HTTP error."""

    def __init__(self, message: str, retry_after: float | None = None) -> None:
        super().__init__(message)
        self.retry_after = retry_after
        """Seconds, where the server named them."""


@dataclass(frozen=True)
class Ask:
    """What every request of a run has in common."""

    max_tokens: int
    model: str | None = None
    fields: Mapping[str, Any] = field(default_factory=dict)
    """Added to the body as they are, and win over what is there."""

    def body(self, prompt: str, *, stream: bool) -> dict[str, Any]:
        """The JSON of a request."""
        body: dict[str, Any] = {
            "messages": [{"role": "user", "content": prompt}],
            "max_tokens": self.max_tokens,
        }
        if self.model is not None:
            body["model"] = self.model
        if stream:
            body |= {"stream": True, "stream_options": {"include_usage": True}}
        return body | dict(self.fields)


@dataclass
class Streamed:
    """A whole stream. Times are seconds after sending."""

    pieces: list[float] = field(default_factory=list)
    """When each piece of text came. A piece is a chunk: one token on most servers, several where the server reads them together."""
    finished: float = 0.0
    """When the reason to stop came: with the last token, which may be one that is not seen."""
    ended: float = 0.0
    finish: str = ""
    usage: Mapping[str, Any] | None = None
    timings: Mapping[str, Any] | None = None
    fingerprint: str | None = None

    @property
    def first(self) -> float:
        """When the first text came."""
        return self.pieces[0]

    @property
    def counted(self) -> str:
        """Who counted the tokens: the server (`usage`), or this side, which sees `pieces` only."""
        return "usage" if self.usage else "pieces"

    @property
    def tokens(self) -> int:
        """Tokens of the answer, the one that ended it included where the server counts."""
        return int(self.usage["completion_tokens"]) if self.usage else len(self.pieces)

    @property
    def rate(self) -> float | None:
        """Tokens after the first, over the seconds after the first: the inverse of what vLLM's benchmark calls TPOT."""
        seconds = (self.finished if self.usage else self.pieces[-1]) - self.first
        return (self.tokens - 1) / seconds if self.tokens > 1 and seconds > 0 else None


def address(url: str) -> str:
    """The endpoint without `/v1`, as it is asked and written down.

    Raises:
        BenchmarkError: it is no address of an HTTP server, or it has a password in it.
    """
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.query:
        raise BenchmarkError(f"expected an address like http://127.0.0.1:8000, found {url!r}")
    if parts.username or parts.password:
        raise BenchmarkError(
            "expected an address without a password, found one with; give a key in a file"
        )
    return url.rstrip("/").removesuffix("/v1")


def client(url: str, api_key: str | None) -> httpx.AsyncClient:
    """One that holds no request back, unpacks nothing and never gives up by itself; callers bound each request."""
    headers = {"accept-encoding": "identity"}
    if api_key:
        headers["authorization"] = f"Bearer {api_key}"
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    return httpx.AsyncClient(
        base_url=address(url),
        headers=headers,
        limits=limits,
        timeout=httpx.Timeout(None, connect=10.0),
    )


async def whole(client: httpx.AsyncClient, ask: Ask, prompt: str) -> tuple[Any, float]:
    """An answer in one piece, and its seconds.

    Raises:
        BenchmarkError: the server refused, or answered with what is no JSON.
        httpx.TransportError: the connection could not be made, or broke.
    """
    begun = time.perf_counter()
    answer = await client.post(PATH, json=ask.body(prompt, stream=False))
    seconds = time.perf_counter() - begun
    check(answer)
    try:
        return answer.json(), seconds
    except ValueError as error:
        raise BenchmarkError(f"expected JSON, found {answer.text[:SHOWN]!r}") from error


async def stream(client: httpx.AsyncClient, ask: Ask, prompt: str) -> Streamed:
    """A streamed answer, to its end.

    Raises:
        BenchmarkError: the server refused, failed within the stream, cut it, or said nothing.
        httpx.TransportError: the connection could not be made, or broke.
    """
    found = Streamed()
    begun = time.perf_counter()
    async with client.stream("POST", PATH, json=ask.body(prompt, stream=True)) as answer:
        if not answer.is_success:
            await answer.aread()
        check(answer)
        async for at, data in _events(answer):
            found.ended = at - begun
            if data != b"[DONE]":
                _read(found, found.ended, data)
    if not found.pieces:
        raise BenchmarkError(f"expected text in answer to {prompt[:SHOWN]!r}, found none")
    found.finished = found.finished or found.pieces[-1]
    return found


async def _events(answer: httpx.Response) -> AsyncIterator[tuple[float, bytes]]:
    """Each event's data and when it came; read to the end, so that the connection can be used again."""
    held, done = b"", False
    async for data in answer.aiter_raw():
        at = time.perf_counter()
        *lines, held = (held + data).split(b"\n")
        for line in lines:
            if line.startswith(b"data:") and not done:
                event = line[5:].strip()
                done = event == b"[DONE]"
                yield at, event
    if not done:
        raise BenchmarkError("expected a stream that ends with [DONE], found one that was cut")


def _read(found: Streamed, at: float, data: bytes) -> None:
    try:
        chunk = json.loads(data)
        if "error" in chunk:
            raise BenchmarkError(f"expected a whole stream, found {_message(chunk)}")
        for choice in chunk["choices"][:1]:
            if any(choice["delta"].get(name) for name in TEXTS):
                found.pieces.append(at)
            if choice.get("finish_reason"):
                found.finish, found.finished = choice["finish_reason"], at
        if usage := chunk.get("usage"):
            int(usage["completion_tokens"])
            found.usage = usage
        found.timings = chunk.get("timings") or found.timings
        found.fingerprint = chunk.get("system_fingerprint") or found.fingerprint
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        shown = data[:SHOWN].decode(errors="replace")
        raise BenchmarkError(f"expected a chunk of a chat completion, found {shown!r}") from error


def check(answer: httpx.Response) -> None:
    """Nothing for an answer that is one.

    Raises:
        RefusedError: its status is another than 2xx.
    """
    if answer.is_success:
        return
    try:
        message = _message(answer.json())
    except (ValueError, KeyError, TypeError):
        message = answer.text[:SHOWN]
    after = answer.headers.get("retry-after", "")
    raise RefusedError(
        f"expected an answer, found HTTP {answer.status_code}: {message}",
        float(after) if after.isdecimal() else None,
    )


def _message(body: Any) -> str:
    error = body["error"]
    return str(error["message"] if isinstance(error, dict) else error)[:SHOWN]
