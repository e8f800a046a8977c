"""The two ends of an exchange on the event loop: the mailbox its events arrive in, the response its frames leave by.

Knows asyncio and ASGI; knows no token, no text and no JSON.

Back pressure: the engine never waits for a reader. What piles up in the mailbox of a slow one are token ids, at most as
many as the context holds; frames are made one at a time, when the socket has taken the one before.
"""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING, Generic, TypeVar

from starlette.responses import Response

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Mapping

    from starlette.types import Receive, Scope, Send

STREAM_HEADERS = {
    "content-type": "text/event-stream; charset=utf-8",
    "cache-control": "no-cache",
    # Without it nginx collects the whole stream before it passes the first byte on.
    "x-accel-buffering": "no",
}

Item = TypeVar("Item")


class Mailbox(Generic[Item]):
    """Items from the engine thread and from the loop in one order, read on the loop."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._queue: asyncio.Queue[Item] = asyncio.Queue()

    def put(self, item: Item) -> None:
        """Append, on the loop."""
        self._queue.put_nowait(item)

    def post(self, item: Item) -> None:
        """Append from another thread. A loop that is closed has nobody to tell."""
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._queue.put_nowait, item)

    async def get(self, patience: float) -> Item | None:
        """The next item, or None after `patience` seconds without one."""
        try:
            async with asyncio.timeout(patience):
                return await self._queue.get()
        except TimeoutError:
            return None


class EventStream(Response):
    """A stream of server-sent events whose first frame is already made."""

    def __init__(
        self, first: bytes, rest: AsyncGenerator[bytes, None], headers: Mapping[str, str]
    ) -> None:
        self.status_code = 200
        self.background = None
        self.init_headers({**STREAM_HEADERS, **headers})
        self._first = first
        self._rest = rest

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send each frame by itself; whoever made them watches for the client leaving."""
        async with contextlib.aclosing(self._rest) as rest:
            await send(
                {
                    "type": "http.response.start",
                    "status": self.status_code,
                    "headers": self.raw_headers,
                }
            )
            await _send_body(send, self._first)
            async for data in rest:
                await _send_body(send, data)
            await _send_body(send, b"", more=False)


async def _send_body(send: Send, data: bytes, *, more: bool = True) -> None:
    await send({"type": "http.response.body", "body": data, "more_body": more})
