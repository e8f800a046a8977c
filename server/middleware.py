"""What every HTTP request passes before its route: request id and log line, CORS, path forms, API key, last errors.

Plain ASGI, in the order `wrap` puts them. Knows headers and paths; knows no body, no model and no engine.
"""

from __future__ import annotations

import hmac
import logging
import re
import time
import uuid
from typing import TYPE_CHECKING

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import JSONResponse, Response

from server.errors import ApiError, server_error
from server.metrics import UNMATCHED_ROUTE, Metrics

if TYPE_CHECKING:
    from collections.abc import Sequence, Set

    from starlette.types import ASGIApp, Message, Receive, Scope, Send

logger = logging.getLogger(__name__)

LOCALHOST = re.compile(r"https?://(localhost|127\.0\.0\.1|\[::1\])(:\d{1,5})?")
REQUEST_ID = re.compile(r"[\x21-\x7e]{1,128}")
HEADER_LIST = re.compile(r"[A-Za-z0-9!#$%&'*+.^_`|~, -]{1,1000}")
METHODS = ("GET", "HEAD", "POST", "OPTIONS")
OPEN_PATHS = frozenset({"/", "/health", "/ready", "/live"})
EXPOSED_HEADERS = "x-request-id, openai-processing-ms, server-timing, retry-after"
# Probes come every few seconds; their lines would bury the others.
QUIET_PATHS = OPEN_PATHS | {"/metrics"}


def error_response(error: ApiError) -> JSONResponse:
    """An `ApiError` as HTTP."""
    return JSONResponse(error.body(), error.status, headers=error.headers)


def bare_path(path: str) -> str:
    """`path` without the `/v1` that every route may be called with."""
    return path.removeprefix("/v1") or "/" if path == "/v1" or path.startswith("/v1/") else path


class Observe:
    """Gives each request an id, measures it, logs one line, counts it."""

    def __init__(self, app: ASGIApp, metrics: Metrics, page_paths: Set[str]) -> None:
        self._app = app
        self._metrics = metrics
        self._quiet_paths = QUIET_PATHS | page_paths

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on; see the class."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        began = time.monotonic()
        method = scope["method"] if scope["method"] in METHODS else "other"
        asked = Headers(scope=scope).get("x-request-id", "")
        request_id = asked if REQUEST_ID.fullmatch(asked) else f"req_{uuid.uuid4().hex}"
        status, stages = 0, ""

        async def send_marked(message: Message) -> None:
            nonlocal status, stages
            if message["type"] == "http.response.start":
                milliseconds = (time.monotonic() - began) * 1000
                headers = MutableHeaders(scope=message)
                headers["x-request-id"] = request_id
                headers["openai-processing-ms"] = str(round(milliseconds))
                status, stages = message["status"], headers.get("server-timing", "")
                total = f"total;dur={milliseconds:.1f}"
                headers["server-timing"] = f"{stages}, {total}" if stages else total
            await send(message)

        self._metrics.http_opened()
        try:
            await self._app(scope, receive, send_marked)
        finally:
            seconds = time.monotonic() - began
            route = getattr(scope.get("route"), "path", UNMATCHED_ROUTE)
            self._metrics.http_closed(method, route, status, seconds)
            logger.log(
                logging.DEBUG if bare_path(scope["path"]) in self._quiet_paths else logging.INFO,
                "%s %s %s %.1f ms %s %s",
                method,
                ascii(scope["path"][:200])[1:-1],
                status,
                seconds * 1000,
                request_id,
                stages,
            )


class Cors:
    """Lets pages of localhost, and of the origins that were named, call this server and read its errors."""

    def __init__(self, app: ASGIApp, origins: Sequence[str]) -> None:
        self._app = app
        self._origins = frozenset(origin.rstrip("/") for origin in origins)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer preflights, which carry no key; mark the other responses."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        asked = Headers(scope=scope)
        allowed = self._headers_for(asked.get("origin", ""))
        if scope["method"] == "OPTIONS" and "access-control-request-method" in asked:
            await self._preflight(asked, allowed)(scope, receive, send)
            return

        async def send_marked(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                headers.add_vary_header("Origin")
                headers.update(allowed)
            await send(message)

        await self._app(scope, receive, send_marked)

    def _headers_for(self, origin: str) -> dict[str, str]:
        # Never together with credentials: keys travel in a header that a page has to set itself.
        if origin and (
            "*" in self._origins or origin in self._origins or LOCALHOST.fullmatch(origin)
        ):
            return {
                "access-control-allow-origin": origin,
                "access-control-expose-headers": EXPOSED_HEADERS,
            }
        return {}

    def _preflight(self, asked: Headers, allowed: dict[str, str]) -> Response:
        headers = {"vary": "Origin"}
        if allowed:
            wanted = asked.get("access-control-request-headers", "")
            if not HEADER_LIST.fullmatch(wanted):
                wanted = "authorization, content-type, x-request-id"
            headers |= allowed | {
                "access-control-allow-methods": ", ".join(METHODS),
                "access-control-allow-headers": wanted,
                "access-control-max-age": "600",
            }
            if asked.get("access-control-request-private-network") == "true":
                headers["access-control-allow-private-network"] = "true"
        return Response(status_code=204, headers=headers)


class LastErrors:
    """Turns what no route expected into a 500 in OpenAI's form."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on; a response that has begun can only be cut."""
        started = False

        async def send_watched(message: Message) -> None:
            nonlocal started
            started = started or message["type"] == "http.response.start"
            await send(message)

        try:
            await self._app(scope, receive, send_watched)
        # The outermost handler of a request: whatever it is, the client gets an error it can read.
        except Exception:
            logger.exception("a request failed")
            if started:
                raise
            response = error_response(server_error("The server failed on this request."))
            await response(scope, receive, send)


class PathForms:
    """Brings a path to its one form without a redirect, which would lose a body or a key; HEAD is GET without body."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Rewrite `scope` in place, so that `Observe` sees the route."""
        if scope["type"] == "http":
            scope["path"] = re.sub(r"//+", "/", scope["path"]).rstrip("/") or "/"
            if scope["method"] == "HEAD":
                scope["method"] = "GET"
                send = _without_body(send)
        await self._app(scope, receive, send)


class RequireKey:
    """Asks for the API key, where one is set, on everything but health and the page, which asks the person for it."""

    def __init__(self, app: ASGIApp, key: str, page_paths: Set[str]) -> None:
        self._app = app
        self._key = key.encode()
        self._page_paths = page_paths

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Let the request pass, or answer 401."""
        path = scope.get("path", "")
        is_open = bare_path(path) in OPEN_PATHS or path in self._page_paths
        if scope["type"] != "http" or is_open or self._knows(scope):
            await self._app(scope, receive, send)
            return
        error = ApiError(
            401,
            "Missing or incorrect API key; send it as authorization: Bearer KEY or x-api-key.",
            code="invalid_api_key",
            headers={"www-authenticate": "Bearer"},
        )
        await error_response(error)(scope, receive, send)

    def _knows(self, scope: Scope) -> bool:
        headers = Headers(scope=scope)
        scheme, _, token = headers.get("authorization", "").partition(" ")
        offered = [headers.get("x-api-key", "")]
        if scheme.lower() == "bearer":
            offered.append(token.strip())
        # Header values are latin-1 on the wire.
        return any(hmac.compare_digest(key.encode("latin-1"), self._key) for key in offered)


def wrap(
    app: ASGIApp,
    *,
    metrics: Metrics,
    cors_origins: Sequence[str],
    api_key: str | None,
    page_paths: Set[str] = frozenset(),
) -> ASGIApp:
    """`app` inside all of the above but `LastErrors`, which belongs inside FastAPI."""
    if api_key:
        app = RequireKey(app, api_key, page_paths)
    return Observe(Cors(PathForms(app), cors_origins), metrics, page_paths)


def _without_body(send: Send) -> Send:
    async def send_head(message: Message) -> None:
        if message["type"] == "http.response.body":
            message = {**message, "body": b""}
        await send(message)

    return send_head
