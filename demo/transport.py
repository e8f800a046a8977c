"""HTTP/1.1 to the next hop, under httpx: one asyncio protocol for each connection, kept for the next request while it is idle.

httpx's own transport waits and counts more than a hop on the same machine can afford (`python -m bench.shim_overhead`), and it
notices neither a server that is gone without a word nor an idle connection that was closed. Requests and heads are h11's.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import ssl
from typing import TYPE_CHECKING, cast

import h11
import httpx

from demo.bodies import BodyError, Chunked, Sized, UntilTheEnd

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from demo.bodies import Body

Address = tuple[str, str, int]
"""Scheme, host and port."""

# Shorter than servers keep an idle connection (75 s ours).
IDLE_SECONDS = 20.0
# Taken in from a server before whoever reads has to catch up.
AHEAD_BYTES = 2**18
# A machine that is gone answers no probe: known after 15 + 3 x 5 s, where TCP by itself would take hours; and what was sent to it
# counts as lost after as long.
PROBE_AFTER, PROBE_EVERY, PROBES = 15, 5, 3
LOST_MILLISECONDS = 30_000


class Transport(httpx.AsyncBaseTransport):
    """Connections to any number of servers; of one event loop."""

    def __init__(self) -> None:
        self._idle: dict[Address, list[_Connection]] = {}
        self._tls: ssl.SSLContext | None = None

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        """Send it, and return when the head of the answer is there.

        Raises:
            httpx.TransportError: as httpx's own transport.
        """
        address = _address(request.url)
        connection = self._kept(address) or await self._new(
            address, request.extensions.get("timeout", {}).get("connect")
        )
        try:
            await connection.say(request)
            response = await connection.head(request.method)
        except BaseException:
            connection.abort()
            raise
        body = _Rest(connection, self._idle.setdefault(address, []))
        return httpx.Response(
            response.status_code,
            headers=response.headers.raw_items(),
            stream=body,
            extensions={"http_version": b"HTTP/1.1", "reason_phrase": response.reason},
        )

    async def aclose(self) -> None:
        """Close what is idle; answers close theirs."""
        for connections in self._idle.values():
            for connection in connections:
                connection.abort()
        self._idle.clear()

    def _kept(self, address: Address) -> _Connection | None:
        connections = self._idle.get(address, [])
        oldest = asyncio.get_running_loop().time() - IDLE_SECONDS
        while connections:
            connection = connections.pop()
            if connection.is_open and connection.idle_since > oldest:
                return connection
            connection.abort()
        return None

    async def _new(self, address: Address, seconds: float | None) -> _Connection:
        scheme, host, port = address
        if scheme == "https" and self._tls is None:
            self._tls = ssl.create_default_context()
        tls = self._tls if scheme == "https" else None
        try:
            async with asyncio.timeout(seconds):
                _, connection = await asyncio.get_running_loop().create_connection(
                    _Connection, host, port, ssl=tls
                )
        except TimeoutError as error:
            raise httpx.ConnectTimeout(f"no connection in {seconds} s") from error
        except (OSError, UnicodeError) as error:
            # The latter for names that cannot be one.
            raise httpx.ConnectError(_said(error)) from error
        return connection


class _Rest(httpx.AsyncByteStream):
    """An answer's body; all that has come between two reads is one piece."""

    def __init__(self, connection: _Connection, idle: list[_Connection]) -> None:
        self._connection, self._idle = connection, idle

    async def __aiter__(self) -> AsyncIterator[bytes]:
        while piece := await self._connection.piece():
            yield piece

    async def aclose(self) -> None:
        if self._connection.rests():
            self._idle.append(self._connection)
        else:
            self._connection.abort()


class _Connection(asyncio.Protocol):
    """One connection: says a request, hears its answer, and again."""

    def __init__(self) -> None:
        self.idle_since = 0.0
        self._loop = asyncio.get_running_loop()
        self._http = h11.Connection(h11.CLIENT)
        self._body: Body = Sized(0)
        self._may_rest = False
        self._fault: Exception | None = None
        self._has_ended = self._is_lost = False
        self._arrived: list[bytes] = []
        self._ahead = 0
        self._news: asyncio.Future[None] | None = None
        self._room: asyncio.Future[None] | None = None

    @property
    def is_open(self) -> bool:
        """It can take a request."""
        return not (self._arrived or self._has_ended or self._is_lost)

    def abort(self) -> None:
        """Close it now, if it is not closed."""
        if not self._is_lost:
            self._transport.abort()

    # -- what a request does -----------------------------------------------------------------------------

    async def say(self, request: httpx.Request) -> None:
        """Send all of it."""
        self._http = h11.Connection(h11.CLIENT)
        self._may_rest = False
        target = request.extensions.get("target", request.url.raw_path)
        # One that refuses a body answers and closes before all of it is sent: its answer is read then.
        with contextlib.suppress(httpx.WriteError):
            try:
                head = h11.Request(
                    method=request.method.encode(), target=target, headers=request.headers.raw
                )
                await self._send(self._http.send(head))
                assert isinstance(request.stream, httpx.AsyncByteStream)
                async for piece in request.stream:
                    await self._send(self._http.send(h11.Data(data=piece)))
                await self._send(self._http.send(h11.EndOfMessage()))
                self._may_rest = True
            except h11.LocalProtocolError as error:
                raise httpx.LocalProtocolError(str(error)) from error

    async def _send(self, data: bytes | None) -> None:
        if self._has_ended or self._transport.is_closing():
            raise httpx.WriteError("the connection was closed")
        if data:
            self._transport.write(data)
        if self._room is not None:
            await self._room

    async def head(self, method: str) -> h11.Response:
        """The answer's head."""
        while True:
            try:
                event = self._http.next_event()
            except h11.RemoteProtocolError as error:
                raise httpx.RemoteProtocolError(str(error)) from error
            if event is h11.NEED_DATA:
                self._http.receive_data(await self._more())
            elif isinstance(event, h11.Response):
                break
            elif not isinstance(event, h11.InformationalResponse):
                raise httpx.RemoteProtocolError(f"expected an answer, found {event!r}")
        self._body = _body_of(method, event)
        self._may_rest = self._may_rest and _stays(event)
        if behind := self._http.trailing_data[0]:
            self._arrived.insert(0, behind)
        return event

    async def piece(self) -> bytes:
        """Some of the answer's body; nothing at its end."""
        try:
            while not self._body.is_done:
                if data := await self._more():
                    if piece := self._body.take(data):
                        return piece
                else:
                    self._body.end()
        except BodyError as error:
            raise httpx.RemoteProtocolError(str(error)) from error
        return b""

    def rests(self) -> bool:
        """After an answer: whether another request may follow."""
        if not (self._may_rest and self._body.is_done) or self._body.rest:
            return False
        self.idle_since = self._loop.time()
        return self.is_open

    async def _more(self) -> bytes:
        """What has come, once something has; nothing at the end."""
        while not self._arrived:
            if self._fault is not None:
                raise httpx.ReadError(str(self._fault)) from self._fault
            if self._has_ended or self._is_lost:
                return b""
            self._news = self._loop.create_future()
            await self._news
        data = self._arrived[0] if len(self._arrived) == 1 else b"".join(self._arrived)
        self._arrived.clear()
        if self._ahead > AHEAD_BYTES and not self._is_lost:
            self._transport.resume_reading()
        self._ahead = 0
        return data

    # -- what asyncio tells ------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """It is there."""
        self._transport = cast("asyncio.Transport", transport)
        _probe(transport.get_extra_info("socket"))

    def data_received(self, data: bytes) -> None:
        """Some bytes; reading stops where nobody takes them."""
        self._arrived.append(data)
        before, self._ahead = self._ahead, self._ahead + len(data)
        if before <= AHEAD_BYTES < self._ahead:
            self._transport.pause_reading()
        self._tell()

    def eof_received(self) -> None:
        """The other side is done, and asyncio closes this one too."""
        self._has_ended = True
        self._tell()

    def connection_lost(self, error: Exception | None) -> None:
        """It is gone."""
        self._is_lost, self._fault = True, error
        self._tell()
        self.resume_writing()

    def pause_writing(self) -> None:
        """The other side does not keep up."""
        self._room = self._loop.create_future()

    def resume_writing(self) -> None:
        """It does again."""
        room, self._room = self._room, None
        if room is not None and not room.done():
            room.set_result(None)

    def _tell(self) -> None:
        if self._news is not None and not self._news.done():
            self._news.set_result(None)


def _body_of(method: str, head: h11.Response) -> Body:
    """What follows it: h11 has refused heads that contradict themselves, and transfer codings other than chunked."""
    if method == "HEAD" or head.status_code in {204, 304}:
        return Sized(0)
    headers = dict(head.headers)
    if b"transfer-encoding" in headers:
        return Chunked()
    length = headers.get(b"content-length")
    return UntilTheEnd() if length is None else Sized(int(length))


def _stays(head: h11.Response) -> bool:
    """Whether the server leaves the connection open."""
    options = b",".join(value for name, value in head.headers if name == b"connection")
    return head.http_version != b"1.0" and b"close" not in options.lower()


def _address(url: httpx.URL) -> Address:
    return url.scheme, url.host, url.port or (443 if url.scheme == "https" else 80)


def _said(error: OSError | UnicodeError) -> str:
    """In the system's words, without the address, which whoever asked knows."""
    if isinstance(error, UnicodeError | socket.gaierror | ssl.SSLError) or error.errno is None:
        return str(error)
    return os.strerror(error.errno)


def _probe(connection: socket.socket) -> None:
    wanted = {
        "TCP_KEEPIDLE": PROBE_AFTER,
        "TCP_KEEPINTVL": PROBE_EVERY,
        "TCP_KEEPCNT": PROBES,
        "TCP_USER_TIMEOUT": LOST_MILLISECONDS,
    }
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in wanted.items():
        # Not every system has them all.
        if hasattr(socket, name):
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
