"""Asks the shim: its state, the server's facts and counters, and for text, whole or as it is made.

Knows OpenAI's API and how it fails; knows nothing of MCP. Leaving a question ends its request, which stops the server.
"""

from __future__ import annotations

import contextlib
import json
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

import httpx

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Iterator
    from types import TracebackType

# The shim is on this machine; what takes long is an answer, and a queue before it.
CONNECT_SECONDS, ANSWER_SECONDS = 5.0, 900.0
START = (
    "start it with `systemctl --user start torchtpu-shim`, or run `torchtpu-rs-shim` in a terminal"
)


class AskError(RuntimeError):
    """There is no answer; the text says which hop failed and what to do."""


@dataclass(frozen=True)
class Piece:
    """Some of an answer: the text that came, or what is told at its end."""

    text: str = ""
    model: str | None = None
    finish: str | None = None
    usage: dict[str, Any] | None = None
    timings: dict[str, Any] | None = None


class Asker:
    """Connections to the shim, of one event loop."""

    def __init__(self, url: str) -> None:
        self.url = url
        # Neither a proxy nor TLS is between this and the shim.
        self._client = httpx.AsyncClient(
            base_url=url,
            timeout=httpx.Timeout(ANSWER_SECONDS, connect=CONNECT_SECONDS),
            trust_env=False,
            verify=False,
        )

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        await self._client.aclose()

    async def object(self, path: str) -> dict[str, Any]:
        """A JSON object.

        Raises:
            AskError: there is none.
        """
        answer = await self._answer("GET", path)
        return _object(answer)

    async def text(self, path: str) -> str:
        """Plain text.

        Raises:
            AskError: there is none.
        """
        return (await self._answer("GET", path)).text

    async def chat(self, body: dict[str, Any]) -> tuple[Piece, float]:
        """A whole answer, and the seconds that it took from here.

        Raises:
            AskError: there is none.
        """
        begun = time.perf_counter()
        answer = await self._answer("POST", "/v1/chat/completions", body)
        seconds = time.perf_counter() - begun
        found = _object(answer)
        with _as_promised(answer.text):
            choice = found["choices"][0]
            text = choice["message"]["content"] or ""
            finish = choice["finish_reason"]
            return Piece(
                text, found["model"], finish, found.get("usage"), found.get("timings")
            ), seconds

    async def stream(self, body: dict[str, Any]) -> AsyncGenerator[Piece]:
        """The same as it is made.

        Raises:
            AskError: there is none, or it was cut.
        """
        asked = body | {"stream": True, "stream_options": {"include_usage": True}}
        with self._told():
            async with self._client.stream("POST", "/v1/chat/completions", json=asked) as answer:
                if not answer.is_success:
                    await answer.aread()
                _refuse(answer)
                async for line in answer.aiter_lines():
                    data = line.removeprefix("data: ")
                    if data == "[DONE]":
                        return
                    if line.startswith("data: "):
                        yield _piece(data)
        raise AskError("expected an answer that ends with [DONE], found one that was cut")

    async def _answer(
        self, method: str, path: str, body: dict[str, Any] | None = None
    ) -> httpx.Response:
        with self._told():
            answer = await self._client.request(method, path, json=body)
        _refuse(answer)
        return answer

    @contextlib.contextmanager
    def _told(self) -> Iterator[None]:
        try:
            yield
        except (httpx.ConnectError, httpx.ConnectTimeout) as error:
            raise AskError(
                f"expected the shim at {self.url}, found nobody there; {START}"
            ) from error
        except httpx.TransportError as error:
            raise AskError(
                f"expected a whole answer from the shim at {self.url}, found {type(error).__name__}; ask again"
            ) from error


def _piece(data: str) -> Piece:
    try:
        chunk = json.loads(data)
    except ValueError as error:
        raise AskError(f"expected a chunk of an answer, found {data[:200]!r}") from error
    with _as_promised(data):
        if "error" in chunk:
            raise AskError(f"the answer was cut: {chunk['error']['message']}")
        choice = chunk["choices"][0] if chunk["choices"] else {"delta": {}}
        return Piece(
            choice["delta"].get("content") or "",
            chunk["model"],
            choice.get("finish_reason"),
            chunk.get("usage"),
            chunk.get("timings"),
        )


@contextlib.contextmanager
def _as_promised(told: str) -> Iterator[None]:
    try:
        yield
    except (KeyError, IndexError, TypeError, AttributeError) as error:
        raise AskError(f"expected a chat completion, found {told[:200]!r}") from error


def _object(answer: httpx.Response) -> dict[str, Any]:
    try:
        found = answer.json()
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise AskError(
            f"expected a JSON object at {answer.url.path}, found {answer.text[:200]!r}; is this port the shim's?"
        )
    return found


def _refuse(answer: httpx.Response) -> None:
    if answer.is_success:
        return
    try:
        message = answer.json()["error"]["message"]
    except (ValueError, KeyError, TypeError):
        message = answer.text[:200]
    raise AskError(f"HTTP {answer.status_code}: {message}")
