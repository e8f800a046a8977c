"""`torchtpu-rs-shim`: 127.0.0.1:8015 is the server, wherever that is now; the chat page is at /, the shim's own state at /shim/status.

Owns the process: options, socket, signals, what systemd is told. Exit status 78: an option is wrong, or the port is taken.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
import sys
from pathlib import Path  # noqa: TC003 - typer reads the annotations
from typing import TYPE_CHECKING, Annotated, NoReturn

import httpx
import typer
import uvicorn
from starlette.responses import JSONResponse
from starlette.routing import Route

import page
from demo.places import by_the_rig, given
from demo.transport import Transport
from demo.upstream import LOOK_SECONDS, Upstream, Watched
from rig.proxy import proxy
from rig.settings import FILE
from server.notify import Notifier

if TYPE_CHECKING:
    from starlette.applications import Starlette
    from starlette.requests import Request
    from starlette.responses import Response

    from demo.places import Look

logger = logging.getLogger(__name__)

HOST, PORT = "127.0.0.1", 8015
BACKLOG = 2048
KEEP_ALIVE_SECONDS = 75
# After a signal, streams get this long to end.
DRAIN_SECONDS = 3
EX_CONFIG = 78
"""Starting again would change nothing, and systemd can be told so (sysexits.h)."""

cli = typer.Typer(
    name="torchtpu-rs-shim", add_completion=False, pretty_exceptions_enable=False, no_args_is_help=False
)  # fmt: skip


def shim(upstream: Upstream, transport: httpx.AsyncBaseTransport) -> Starlette:
    """The app."""

    async def status(_: Request) -> Response:
        return JSONResponse(await upstream.status(), headers={"cache-control": "no-store"})

    return proxy(
        upstream.url,
        upstream_key=upstream.key,
        routes=[Route("/shim/status", status), *page.routes()],
        hop="The shim",
        transport=Watched(transport, upstream),
    )


class Shim(uvicorn.Server):
    """uvicorn, and what is around it: the first look, and signs of life for systemd."""

    def __init__(self, config: uvicorn.Config, upstream: Upstream, ready: str) -> None:
        super().__init__(config)
        self._upstream, self._ready = upstream, ready
        self._notifier = Notifier()
        self._alive: asyncio.Task[None] | None = None

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Look for the server, and serve; who comes earlier waits in the listener's queue."""
        await self._upstream.look_first()
        await super().startup(sockets)
        self._notifier.say("READY=1", f"STATUS={self._ready}")
        logger.info("%s", self._ready)
        if self._notifier.alive_every:
            self._alive = asyncio.create_task(self._tell_alive())

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """End, and leave nothing open."""
        self._notifier.stopping()
        await super().shutdown(sockets)
        if self._alive is not None:
            self._alive.cancel()
        await self._upstream.aclose()

    async def _tell_alive(self) -> None:
        while True:
            self._notifier.alive()
            await asyncio.sleep(self._notifier.alive_every)


@cli.command()
def run(
    url: Annotated[
        str | None,
        typer.Option(envvar="TORCHTPU_SHIM_UPSTREAM", help="The server's address, instead of the rig's VM."),
    ] = None,
    router: Annotated[
        str | None,
        typer.Option(envvar="TORCHTPU_SHIM_ROUTER", help="Address of `torchtpu-rig fleet serve`."),
    ] = None,
    api_key_file: Annotated[
        Path | None,
        typer.Option(envvar="TORCHTPU_SHIM_API_KEY_FILE", help="File with the API key of --url, --router or a server on this machine; the rig knows its VM's."),
    ] = None,
    project: Annotated[str | None, typer.Option(help="Instead of PROJECT_ID of tpu.env.")] = None,
    zone: Annotated[str | None, typer.Option(help="Instead of ZONE.")] = None,
    name: Annotated[str | None, typer.Option(help="Instead of QUEUED_RESOURCE.")] = None,
    settings: Annotated[
        Path, typer.Option(envvar="RIG_SETTINGS", help="The rig's tpu.env.")
    ] = FILE,
    port: Annotated[
        int, typer.Option(envvar="TORCHTPU_SHIM_PORT", help="Port on 127.0.0.1; 0 takes a free one.")
    ] = PORT,
    look_seconds: Annotated[float, typer.Option(hidden=True)] = LOOK_SECONDS,
) -> None:  # fmt: skip
    """One address on this machine for the server: the rig's VM, or --url, or --router, or without a project a server on port 8000 here."""
    logging.basicConfig(stream=sys.stderr, level=logging.INFO, format="%(message)s")
    for chatty in ("httpx", "uvicorn"):
        logging.getLogger(chatty).setLevel(logging.WARNING)
    if url and router:
        _end("expected --url or --router, found both")
    key = _key_in(api_key_file)
    look: Look
    if place := url or router:
        look = given(_checked(place), "url" if url else "router", key)
    else:
        look = by_the_rig(settings, key, project_id=project, zone=zone, queued_resource=name)
    serve(look, port, look_seconds)


def serve(look: Look, port: int, look_seconds: float = LOOK_SECONDS) -> None:
    """Until a signal; `port` 0 takes a free one."""
    with _listening(port) as listener:
        transport = Transport()
        upstream = Upstream(look, transport, look_seconds)
        config = uvicorn.Config(
            shim(upstream, transport),
            log_config=None,
            access_log=False,
            # The server's own pass.
            server_header=False,
            date_header=False,
            ws="none",
            timeout_keep_alive=KEEP_ALIVE_SECONDS,
            timeout_graceful_shutdown=DRAIN_SECONDS,
        )
        address = f"http://{HOST}:{listener.getsockname()[1]}"
        ready = f"{address} is the chat page, {address}/v1 the API, {address}/shim/status the state"
        Shim(config, upstream, ready).run(sockets=[listener])


def main() -> None:
    """The entry point."""
    cli(prog_name="torchtpu-rs-shim")


def _listening(port: int) -> socket.socket:
    # Its protocol is named: only then does asyncio set TCP_NODELAY, without which small pieces wait 40 ms.
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((HOST, port))
        listener.listen(BACKLOG)
    except (OSError, OverflowError) as error:
        listener.close()
        _end(
            f"expected to listen on {HOST}:{port}, found: {error}; give another --port, or end what is there"
        )
    return listener


def _checked(address: str) -> str:
    """Without what a client would add again."""
    try:
        url = httpx.URL(address.strip())
    except httpx.InvalidURL:
        url = httpx.URL("")
    if url.scheme not in ("http", "https") or not url.host or url.userinfo or url.query:
        _end(f"expected an address like http://127.0.0.1:8000, found {address!r}")
    return str(url).rstrip("/").removesuffix("/v1").rstrip("/")


def _key_in(file: Path | None) -> str | None:
    if file is None:
        return None
    try:
        key = file.read_text().strip()
    except OSError as error:
        _end(f"expected an API key in {file}, found: {os.strerror(error.errno or 0)}")
    if not key.isascii() or not key.isprintable() or not key:
        _end(f"expected an API key in {file}, found something else")
    return key


def _end(text: str) -> NoReturn:
    with contextlib.suppress(OSError):
        sys.stderr.write(f"torchtpu-rs-shim: {text}\n")
    raise typer.Exit(EX_CONFIG)


if __name__ == "__main__":
    main()
