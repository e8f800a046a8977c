"""An OpenAI endpoint that says what a test wrote, around the page: it can break where no real server would."""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
from typing import TYPE_CHECKING, Any

import uvicorn
from starlette.applications import Starlette
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

import page
from server.serving import bind, url_of
from tests.fakes import PATIENCE_SECONDS, Gate

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator, Sequence

    from starlette.requests import Request

DONE = "[DONE]"


def delta(**fields: Any) -> dict[str, Any]:
    """A chunk with a delta."""
    return {"choices": [{"index": 0, "delta": fields, "finish_reason": None}]}


def end(reason: str = "stop", **more: Any) -> dict[str, Any]:
    """The chunk that says why an answer ended."""
    return {"choices": [{"index": 0, "delta": {}, "finish_reason": reason}], **more}


Item = dict[str, Any] | str | Gate


class Scripted:
    """A server whose next answers stand in `script`, one list each; the last is said again and again."""

    def __init__(self) -> None:
        self.script: list[Sequence[Item] | Response] = []
        self.bodies: list[dict[str, Any]] = []
        self.shim: dict[str, Any] | None = None
        self.health: dict[str, Any] = {"status": "ok"}
        self._listener = bind("127.0.0.1", 0)
        self.url = url_of(self._listener)
        app = Starlette(
            routes=[
                *page.routes(),
                Route("/health", self._health),
                Route("/v1/models", self._models),
                Route("/shim/status", self._shim),
                Route("/v1/chat/completions", self._answer, methods=["POST"]),
            ]
        )
        self._server = uvicorn.Server(uvicorn.Config(app, log_config=None, ws="none"))
        self._thread = threading.Thread(target=self._run, name="scripted")
        self._thread.start()

    def say(self, *items: Item) -> None:
        """Script a whole answer."""
        self.script = [[*items, end(), DONE]]

    def close(self) -> None:
        """Stop the server and wait until it is gone."""
        self._server.should_exit = True
        self._thread.join(PATIENCE_SECONDS)
        assert not self._thread.is_alive()

    def _run(self) -> None:
        with self._listener:
            self._server.run(sockets=[self._listener])

    async def _health(self, _request: Request) -> Response:
        return JSONResponse(self.health, 200 if self.health["status"] == "ok" else 503)

    async def _models(self, _request: Request) -> Response:
        return JSONResponse({"object": "list", "data": [{"id": "scripted"}]})

    async def _shim(self, _request: Request) -> Response:
        return JSONResponse(self.shim, 404 if self.shim is None else 200)

    async def _answer(self, request: Request) -> Response:
        self.bodies.append(await request.json())
        answer = self.script.pop(0) if len(self.script) > 1 else self.script[0]
        if isinstance(answer, Response):
            return answer
        return StreamingResponse(_events(answer), media_type="text/event-stream")


async def _events(items: Sequence[Item]) -> AsyncIterator[str]:
    for item in items:
        if isinstance(item, Gate):
            await asyncio.to_thread(item.pass_through)
        else:
            yield f"data: {item if isinstance(item, str) else json.dumps(item)}\n\n"


@contextlib.contextmanager
def running() -> Iterator[Scripted]:
    """A scripted server while the block runs."""
    server = Scripted()
    try:
        yield server
    finally:
        server.close()
