"""An OpenAI endpoint whose times are known: the first token after so long, then one every so long, by a clock that does not drift.

    python -m tests.bench.scripted --port 8200 --first 0.2 --gap 0.02 --tokens 50

It also does what servers do to clients: refuses, fails within a stream, cuts it, gives no usage. As a process it is what
benchmark tools are compared on.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import threading
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Self

import uvicorn
from starlette.applications import Starlette
from starlette.responses import JSONResponse, StreamingResponse
from starlette.routing import Route

from server.serving import bind, url_of
from tests.fakes import PATIENCE_SECONDS

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Mapping

    from starlette.requests import Request
    from starlette.responses import Response

MODEL = "scripted"


@dataclass
class Script:
    """How it answers. Seconds and tokens."""

    first: float = 0.03
    spread: float = 0.0
    """The slowest first token takes so much longer than the fastest, as a part of `first`; few are slow."""
    gap: float = 0.004
    tokens: int = 10
    usage: bool = True
    timings: Mapping[str, float] | None = None
    tokens_per_chunk: int = 1
    refuse: dict[int, tuple[int, dict[str, str]]] = field(default_factory=dict)
    """Status and headers, by the number of the request from 1; 0 is all of them."""
    frames: list[str] | None = None
    """What a stream is made of, in place of tokens."""
    answers: int = 0
    """So many, and the requests after them wait without end; 0 is all."""
    slots: int = 0
    """So many answers at a time; 0 is without end."""
    owned_by: str = "vllm"
    asked: list[dict[str, Any]] = field(default_factory=list)
    """The bodies that came."""
    connections: set[object] = field(default_factory=set)
    """The addresses they came from."""
    most: int = 0
    """The most answers at a time."""
    lost: int = 0
    """Streams that the client left."""


class Scripted:
    """The endpoint, on a thread of its own, as long as the `with` lasts."""

    def __init__(self, script: Script | None = None, port: int = 0) -> None:
        self.script = script or Script()
        self._running = 0
        self._slots: asyncio.Semaphore | None = None
        routes = [
            Route("/v1/models", self._models),
            Route("/v1/chat/completions", self._chat, methods=["POST"]),
            Route("/version", self._version),
        ]
        config = uvicorn.Config(
            Starlette(routes=routes), log_config=None, access_log=False, ws="none", lifespan="off"
        )
        self._server = uvicorn.Server(config)
        self._listener = bind("127.0.0.1", port)
        self.url = url_of(self._listener)
        self._thread = threading.Thread(target=self.run, name="scripted")

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.should_exit = True
        self._thread.join(PATIENCE_SECONDS)
        assert not self._thread.is_alive(), "the scripted endpoint did not stop"

    def run(self) -> None:
        """Serve until told otherwise."""
        with self._listener:
            self._server.run(sockets=[self._listener])

    async def _models(self, _: Request) -> Response:
        entry = {
            "id": MODEL,
            "owned_by": self.script.owned_by,
            "max_model_len": 4096,
            "root": MODEL,
        }
        return JSONResponse({"object": "list", "data": [entry]})

    async def _version(self, _: Request) -> Response:
        return JSONResponse({"version": "0.0-scripted"})

    async def _chat(self, request: Request) -> Response:
        script = self.script
        body = await request.json()
        script.asked.append(body)
        script.connections.add(request.client)
        refused = script.refuse.get(len(script.asked)) or script.refuse.get(0)
        if refused:
            status, headers = refused
            return JSONResponse({"error": {"message": f"refused with {status}"}}, status, headers)
        if body.get("stream"):
            return StreamingResponse(self._stream(), media_type="text/event-stream")
        await asyncio.sleep(script.first + script.gap * (script.tokens - 1))
        whole: dict[str, Any] = {
            "model": MODEL,
            "choices": [
                {"finish_reason": "length", "message": {"content": "word " * script.tokens}}
            ],
            "usage": self._usage(),
        }
        return JSONResponse(whole | ({"timings": script.timings} if script.timings else {}))

    async def _stream(self) -> AsyncIterator[str]:
        script = self.script
        if self._slots is None and script.slots:
            self._slots = asyncio.Semaphore(script.slots)
        if self._slots:
            await self._slots.acquire()
        self._running += 1
        script.most = max(script.most, self._running)
        ended = False
        try:
            if script.frames is not None:
                for frame in script.frames:
                    yield f"data: {frame}\n\n"
            else:
                async for chunk in self._chunks():
                    yield f"data: {json.dumps(chunk)}\n\n"
                yield "data: [DONE]\n\n"
            ended = True
        finally:
            script.lost += not ended
            self._running -= 1
            if self._slots:
                self._slots.release()

    async def _chunks(self) -> AsyncIterator[dict[str, Any]]:
        script = self.script
        if script.answers and len(script.asked) > script.answers:
            await asyncio.Event().wait()
        begun = time.perf_counter() + script.first * script.spread * _rank(len(script.asked)) ** 3
        size = script.tokens_per_chunk
        for index in range(0, script.tokens, size):
            due = begun + script.first + script.gap * index
            await asyncio.sleep(max(0.0, due - time.perf_counter()))
            text = "word " * min(size, script.tokens - index)
            if index == 0:
                yield _choice({"role": "assistant", "content": ""})
            yield _choice({"content": text})
        yield _choice({}, "length")
        if script.usage:
            yield {"choices": [], "usage": self._usage()}

    def _usage(self) -> dict[str, int]:
        return {"prompt_tokens": 7, "completion_tokens": self.script.tokens}


def _rank(number: int) -> float:
    """In [0, 1), evenly spread over any run of numbers, and the same each time."""
    return number * (5**0.5 - 1) / 2 % 1


def _choice(delta: dict[str, Any], finish: str | None = None) -> dict[str, Any]:
    return {"choices": [{"index": 0, "delta": delta, "finish_reason": finish}]}


def main() -> None:
    """As a process of its own."""
    parser = argparse.ArgumentParser(description="An OpenAI endpoint whose times are known.")
    parser.add_argument("--port", type=int, default=8200)
    parser.add_argument("--first", type=float, default=0.2)
    parser.add_argument("--spread", type=float, default=0.0)
    parser.add_argument("--gap", type=float, default=0.02)
    parser.add_argument("--tokens", type=int, default=50)
    parser.add_argument("--slots", type=int, default=0)
    given = parser.parse_args()
    script = Script(
        first=given.first,
        spread=given.spread,
        gap=given.gap,
        tokens=given.tokens,
        slots=given.slots,
    )
    Scripted(script, given.port).run()


if __name__ == "__main__":
    main()
