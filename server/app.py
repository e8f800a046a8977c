"""The ASGI app: routes under `/v1` and without it, OpenAI's error form for everything, the worker's life.

`create_app` does no work: the worker starts with the app's lifespan, so the port answers while the model loads.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
from typing import TYPE_CHECKING

from fastapi import FastAPI, Request, Response
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

import page
from server import inspection, routes
from server.engine import package_version
from server.errors import ApiError, clip
from server.exchange import CLIENT_LEFT_STATUS
from server.middleware import LastErrors, error_response, wrap
from server.openapi import describe

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from starlette.types import ASGIApp

    from server.service import Service

# A step of the engine is short; one that takes longer does not keep the process.
JOIN_SECONDS = 5.0


def create_app(service: Service) -> ASGIApp:
    """The whole app around `service`."""

    @contextlib.asynccontextmanager
    async def lifespan(_app: FastAPI) -> AsyncIterator[None]:
        service.worker.start()
        yield
        service.worker.stop()
        await asyncio.to_thread(service.worker.join, JOIN_SECONDS)

    app = FastAPI(
        title="torchtpu-rs",
        version=package_version(),
        lifespan=lifespan,
        redirect_slashes=False,
        # The documentation pages load scripts from a CDN, which a TPU VM need not reach.
        docs_url=None,
        redoc_url=None,
    )
    app.state.service = service
    if service.settings.page:
        # In front of the route that answers `/` to other clients.
        app.router.routes.extend(page.routes())
    app.openapi = functools.cache(lambda: describe(app))  # type: ignore[method-assign]
    for router in (routes.router, inspection.router):
        app.include_router(router, prefix="/v1")
        app.include_router(router, include_in_schema=False)
    # Inside FastAPI's own last handler, which would answer in plain text.
    app.add_middleware(LastErrors)
    app.add_exception_handler(ApiError, _answer_api_error)
    app.add_exception_handler(HTTPException, _answer_http_error)
    app.add_exception_handler(ClientDisconnect, _answer_nobody)
    key = service.settings.api_key
    return wrap(
        app,
        metrics=service.metrics,
        cors_origins=service.settings.cors_origin,
        api_key=key.get_secret_value() if key else None,
        page_paths=frozenset(page.pages()) if service.settings.page else frozenset(),
    )


async def _answer_api_error(_request: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return error_response(error)


async def _answer_http_error(request: Request, error: Exception) -> Response:
    """404 and 405 as the router raises them."""
    assert isinstance(error, HTTPException)
    path = clip(request.scope["path"], 200)
    headers = dict(error.headers or {})
    if error.status_code == 404:
        hint = ""
        if path.startswith("/v1/v1"):
            hint = " The base URL ends with /v1 and the client adds it again; leave one out."
        refusal = ApiError(404, f"There is no {request.method} {path}.{hint}", code="not_found")
    elif error.status_code == 405:
        allowed = headers.get("allow", headers.get("Allow", ""))
        refusal = ApiError(
            405,
            f"{path} does not take {clip(request.method, 20)}, only {allowed}.",
            code="method_not_allowed",
            headers=headers,
        )
    else:
        refusal = ApiError(error.status_code, clip(str(error.detail), 500), headers=headers)
    return error_response(refusal)


async def _answer_nobody(_request: Request, _error: Exception) -> Response:
    return Response(status_code=CLIENT_LEFT_STATUS)
