"""An OpenAI endpoint passed through: callers are checked, the next hop's key is added, and nothing is buffered or kept.

Where requests go is asked anew for each, so that a new VM needs no restart. What is refused on the way is an OpenAI error object
that names the hop. Knows no VM, no router and no model; keys are in no log and no error.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import hmac
import logging
import re
from typing import TYPE_CHECKING, Any

import httpx
from starlette.applications import Starlette
from starlette.datastructures import Headers
from starlette.middleware import Middleware
from starlette.responses import JSONResponse
from starlette.routing import Mount

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Collection, Sequence

    from starlette.routing import BaseRoute
    from starlette.types import ASGIApp, Receive, Scope, Send

logger = logging.getLogger(__name__)

CONNECT_SECONDS = 5.0
# Shorter than servers keep an idle connection (75 s ours), so that a request never meets one that is being closed.
IDLE_SECONDS = 20.0
LOOPBACK = frozenset({"127.0.0.1", "localhost", "[::1]"})
ANY = "*"
# RFC 9110, 7.6.1: these belong to one connection; Host is the next hop's own.
HOP_BY_HOP = frozenset(
    (
        *(b"connection", b"keep-alive", b"proxy-authenticate", b"proxy-authorization", b"te"),
        *(b"trailer", b"transfer-encoding", b"upgrade", b"proxy-connection", b"host"),
    )
)
KEYS = frozenset({b"authorization", b"x-api-key"})
AUTHORITY = re.compile(r"(\[[0-9a-f:.]+\]|[^\s:/@\[\]]+)(:\d{1,5})?", re.ASCII | re.IGNORECASE)
PLAIN_LIMIT = 2000
# What web frameworks say of a body that they cannot read, and what OpenAI says of it.
STATUS_OF = {415: 400, 422: 400}


class NoUpstreamError(RuntimeError):
    """There is nothing to pass requests to now; the text says why and what to do."""


class RefusedError(Exception):
    """An answer of this hop's own: HTTP status plus OpenAI's `error` object."""

    def __init__(
        self,
        status: int,
        message: str,
        code: str,
        *,
        kind: str | None = None,
        headers: dict[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        kind = kind or ("invalid_request_error" if status < 500 else "server_error")
        error = {"message": message, "type": kind, "param": None, "code": code}
        self.body = {"error": error}
        self.headers = headers or {}

    def response(self) -> JSONResponse:
        """As HTTP."""
        return JSONResponse(self.body, self.status, headers=self.headers)


def _everything(path: str) -> bool:
    return True


def proxy(
    upstream: Callable[[], str],
    *,
    upstream_key: Callable[[], str | None] = lambda: None,
    caller_key: str | None = None,
    names: Collection[str] = (),
    passes: Callable[[str], bool] = _everything,
    routes: Sequence[BaseRoute] = (),
    hop: str = "The proxy",
    transport: httpx.AsyncBaseTransport | None = None,
) -> Starlette:
    """An app that passes every request on to `upstream()`, with `upstream_key()` in place of the caller's key.

    `upstream` is called on the event loop for each request, must not block, and may raise NoUpstreamError. `caller_key` is asked of
    callers where it is set. `names` are those it may be called by besides this machine's own; ANY is for who asks for a key. Paths that `passes` refuses are 404;
    `routes` are answered here instead, without a key. `hop` is what this one is called in errors.
    `transport` is the way to the next hop, where httpx's own is not wanted.
    """
    client = httpx.AsyncClient(
        transport=transport,
        # Streams last as long as they last.
        timeout=httpx.Timeout(None, connect=CONNECT_SECONDS),
        limits=httpx.Limits(max_connections=None, keepalive_expiry=IDLE_SECONDS),
        # The address that was found is the one that is used, and no netrc puts its password in place of the key.
        trust_env=False,
    )

    @contextlib.asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        async with client:
            yield

    passing = PassThrough(client, upstream, upstream_key, caller_key, passes, hop)
    return Starlette(
        routes=[*routes, Mount("/", passing)],
        middleware=[Middleware(KnownNames, names=names, hop=hop)],
        lifespan=lifespan,
    )


class KnownNames:
    """Refuses what a web page elsewhere sends here: under a name that was made to lead here (DNS rebinding), or from its own origin."""

    def __init__(self, app: ASGIApp, names: Collection[str], hop: str) -> None:
        self._app, self._hop = app, hop
        self._names = LOOPBACK | {name.lower() for name in names}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on, or answer 403."""
        if scope["type"] == "http" and ANY not in self._names:
            headers = Headers(scope=scope)
            try:
                self._check("host", headers.getlist("host"), required=True)
                origins = [_without_scheme(origin) for origin in headers.getlist("origin")]
                self._check("origin", origins, required=False)
            except RefusedError as refused:
                await refused.response()(scope, receive, send)
                return
        await self._app(scope, receive, send)

    def _check(self, header: str, values: list[str], *, required: bool) -> None:
        if not values and not required:
            return
        found = AUTHORITY.fullmatch(values[0]) if len(values) == 1 else None
        if found is None or found[1].lower() not in self._names:
            raise RefusedError(
                403,
                f"{self._hop} may not be called with this {header} header; it knows {', '.join(sorted(self._names))}.",
                f"{header}_not_allowed",
            )


def _without_scheme(origin: str) -> str:
    scheme, separator, authority = origin.partition("://")
    return authority if separator and scheme.lower() in {"http", "https"} else ""


class PassThrough:
    """The last part of the app: one request to the next hop, and its answer back as it comes."""

    def __init__(
        self,
        client: httpx.AsyncClient,
        upstream: Callable[[], str],
        upstream_key: Callable[[], str | None],
        caller_key: str | None,
        passes: Callable[[str], bool],
        hop: str,
    ) -> None:
        self._client, self._upstream, self._upstream_key = client, upstream, upstream_key
        self._caller_key = caller_key.encode() if caller_key else None
        self._passes, self._hop = passes, hop

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass it on; a caller that leaves ends it at once, wherever it is."""
        if scope["type"] != "http":
            raise RuntimeError(f"expected an HTTP request, found {scope['type']}")
        upload = Upload(receive)
        passing = asyncio.create_task(self._answer_to(scope, upload, receive, send))
        leaving = asyncio.create_task(upload.until_the_caller_leaves())
        # It is cancelled when the process ends; the answer then stays without its end.
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.wait({passing, leaving}, return_when=asyncio.FIRST_COMPLETED)
        # Closing the connection to the next hop is what makes its server stop.
        for task in (passing, leaving):
            task.cancel()
        await asyncio.gather(passing, leaving, return_exceptions=True)
        if not passing.cancelled():
            passing.result()

    async def _answer_to(self, scope: Scope, upload: Upload, receive: Receive, send: Send) -> None:
        try:
            response = await self._sent(scope, upload)
            try:
                await self._refuse_plain_errors(scope, response)
                await self._pass_back(response, send)
            finally:
                await response.aclose()
        except RefusedError as refused:
            await refused.response()(scope, receive, send)

    # -- there -----------------------------------------------------------------------------------------

    async def _sent(self, scope: Scope, upload: Upload) -> httpx.Response:
        headers = Headers(scope=scope)
        # A preflight carries no key.
        if scope["method"] != "OPTIONS" and not self._knows(headers):
            raise RefusedError(
                401,
                f"{self._hop} expects its API key as authorization: Bearer KEY or x-api-key.",
                "invalid_api_key",
                headers={"www-authenticate": "Bearer"},
            )
        if not self._passes(scope["path"]):
            raise RefusedError(404, f"{self._hop} does not pass this path.", "not_found")
        try:
            url = self._upstream()
        except NoUpstreamError as error:
            raise RefusedError(
                503, str(error), "no_upstream", headers={"retry-after": "5"}
            ) from error
        has_body = "content-length" in headers or "transfer-encoding" in headers
        request = httpx.Request(
            scope["method"],
            _parsed(url),
            headers=self._headers_for(scope),
            content=upload if has_body else None,
            extensions={"target": _target(url, scope)},
        )
        try:
            return await self._client.send(request, stream=True)
        except httpx.TimeoutException as error:
            raise self._unreachable(
                504, url, "no connection in time", "upstream_timeout"
            ) from error
        except httpx.ConnectError as error:
            raise self._unreachable(502, url, "no connection", "upstream_unreachable") from error
        except httpx.TransportError as error:
            told = "a connection that ended before an answer"
            raise self._unreachable(502, url, told, "upstream_failed") from error

    def _unreachable(self, status: int, url: str, found: str, code: str) -> RefusedError:
        address = _parsed(url).netloc.decode()
        return RefusedError(
            status, f"{self._hop} expected an answer from {address}, found {found}.", code
        )

    def _knows(self, headers: Headers) -> bool:
        if self._caller_key is None:
            return True
        scheme, _, token = headers.get("authorization", "").partition(" ")
        offered = [headers.get("x-api-key", "")]
        if scheme.lower() == "bearer":
            offered.append(token.strip())
        # Header values are latin-1 on the wire.
        return any(hmac.compare_digest(key.encode("latin-1"), self._caller_key) for key in offered)

    def _headers_for(self, scope: Scope) -> list[tuple[bytes, bytes]]:
        key = self._upstream_key()
        # A key that was for this hop goes no further.
        dropped = KEYS if key or self._caller_key else frozenset()
        headers = [header for header in _passed(scope["headers"]) if header[0] not in dropped]
        if key:
            headers.append((b"authorization", b"Bearer " + key.encode()))
        return headers

    # -- and back --------------------------------------------------------------------------------------

    async def _refuse_plain_errors(self, scope: Scope, response: httpx.Response) -> None:
        """The server's errors are JSON: what is not comes from a hop in between, and is put into their form."""
        status = response.status_code
        is_json = response.headers.get("content-type", "").startswith("application/json")
        if status < 400 or is_json or scope["method"] == "HEAD":
            return
        text = b""
        with contextlib.suppress(httpx.TransportError):
            async for piece in response.aiter_bytes():
                text += piece
                if len(text) > PLAIN_LIMIT:
                    break
        kept = ("allow", "retry-after", "www-authenticate", "x-request-id")
        told = " ".join(text[:PLAIN_LIMIT].decode(errors="replace").split())
        raise RefusedError(
            STATUS_OF.get(status, status),
            f"The hop behind {self._hop[0].lower()}{self._hop[1:]} answered {status}: {told or response.reason_phrase}",
            "upstream_refused",
            headers={name: response.headers[name] for name in kept if name in response.headers},
        )

    async def _pass_back(self, response: httpx.Response, send: Send) -> None:
        headers = _passed(response.headers.raw)
        await send(
            {"type": "http.response.start", "status": response.status_code, "headers": headers}
        )
        is_stream = response.headers.get("content-type", "").startswith("text/event-stream")
        tail = b"\n\n"
        try:
            # The stream itself: httpx's ways to read it count and cut, for each piece of it.
            assert isinstance(response.stream, httpx.AsyncByteStream)
            async for piece in response.stream:
                tail = (tail + piece)[-2:]
                # Waits for a caller that reads slowly, and so does the next hop then.
                await send(_piece(piece))
        except httpx.TransportError as error:
            logger.warning("%s: an answer was cut: %s", self._hop, type(error).__name__)
            if not is_stream or tail != b"\n\n":
                # Left without its end, which closes the connection: the caller sees that it is not whole.
                return
            cut = RefusedError(502, f"{self._hop} lost the answer on its way.", "upstream_failed")
            frame = cut.response().body
            await send(_piece(b"data: " + bytes(frame) + b"\n\ndata: [DONE]\n\n"))
        await send({"type": "http.response.body", "body": b"", "more_body": False})


class Upload:
    """A request's body as it arrives, a piece at a time, and the news that its sender has gone."""

    def __init__(self, receive: Receive) -> None:
        self._receive = receive
        # Room for a small body and its end, so that a caller who leaves while there is no connection yet is noticed.
        self._pieces: asyncio.Queue[bytes | None] = asyncio.Queue(maxsize=2)

    async def until_the_caller_leaves(self) -> None:
        """Take in the body, no faster than it is passed on; returns when the caller has left."""
        while True:
            message = await self._receive()
            if message["type"] == "http.disconnect":
                return
            if piece := message.get("body", b""):
                await self._pieces.put(piece)
            if not message.get("more_body", False):
                await self._pieces.put(None)

    async def __aiter__(self) -> AsyncIterator[bytes]:
        """The pieces."""
        while (piece := await self._pieces.get()) is not None:
            yield piece


# Taking an address apart costs as much as passing a piece on.
_parsed = functools.lru_cache(maxsize=8)(httpx.URL)


def _target(url: str, scope: Scope) -> bytes:
    """Path and query as they came: a client library would tidy them up."""
    path: bytes = _parsed(url).raw_path.rstrip(b"/") + scope["raw_path"]
    query: bytes = scope["query_string"]
    return path + b"?" + query if query else path


def _passed(headers: Sequence[tuple[bytes, bytes]]) -> list[tuple[bytes, bytes]]:
    """Those that go further, with names in lower case: all but hop-by-hop ones and those that Connection names."""
    lowered = [(name.lower(), value) for name, value in headers]
    listed = b",".join(value for name, value in lowered if name == b"connection").lower()
    dropped = HOP_BY_HOP | {name.strip() for name in listed.split(b",")}
    return [header for header in lowered if header[0] not in dropped]


def _piece(body: bytes) -> dict[str, Any]:
    return {"type": "http.response.body", "body": body, "more_body": True}
