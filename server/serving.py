"""One server process from its socket to its exit code: uvicorn, signals, draining, a load that fails.

Owns the process; knows nothing of what is served.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import sys
import time
from typing import TYPE_CHECKING

import uvicorn

from server.app import create_app
from server.loading import ModelLoader
from server.loading_display import LoadingDisplay
from server.notify import Notifier
from server.service import Service

if TYPE_CHECKING:
    from types import FrameType

    from rich.console import Console
    from starlette.types import ASGIApp

    from server.settings import Settings
    from server.worker import Progress

logger = logging.getLogger(__name__)

# After the drain only last frames are still being written.
SHUTDOWN_SECONDS = 3
BACKLOG = 2048
KEEP_ALIVE_SECONDS = 75
# What a user can put right is told in a sentence; anything else is ours and comes with its traceback.
EXPLAINED = (ValueError, ImportError, OSError, MemoryError)


class DrainingServer(uvicorn.Server):
    """uvicorn, except that a signal drains first: uvicorn alone would wait for streams or cut them without a word."""

    def __init__(self, config: uvicorn.Config, service: Service) -> None:
        super().__init__(config)
        self.exit_code = 0
        self._service = service
        self._loop: asyncio.AbstractEventLoop | None = None
        self._drain: asyncio.Task[None] | None = None
        self._signalled = False

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Remember the loop, then start as uvicorn does."""
        self._loop = asyncio.get_running_loop()
        await super().startup(sockets)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """First signal: drain. Second: exit at once."""
        if self._signalled:
            # The engine thread may be deep in native code; nothing gentler is certain to end the process.
            os._exit(128 + sig)
        self._signalled = True
        if self._loop is None:
            self.should_exit = True
            return
        name = signal.Signals(sig).name
        self._loop.call_soon_threadsafe(self._begin_drain, name)

    def load_failed(self) -> None:
        """End with an error; called on the engine thread."""
        self.exit_code = 1
        self.should_exit = True

    def _begin_drain(self, name: str) -> None:
        logger.info("%s: finishing %d requests, then exiting", name, len(self._service.active))
        self._drain = asyncio.create_task(self._drain_and_exit())

    async def _drain_and_exit(self) -> None:
        await self._service.drain()
        self.should_exit = True


def serve(settings: Settings, console: Console, loader: ModelLoader | None = None) -> int:
    """Serve until a signal; the exit code is 0 after a drain and 1 when the model could not be loaded.

    Raises:
        OSError: the address cannot be bound.
    """
    listener = bind(settings.host, settings.port)
    display = LoadingDisplay(console)

    def on_progress(progress: Progress) -> None:
        display(progress)
        if progress.phase == "ready":
            logger.info(
                "ready in %.1f s: %s at %s/v1",
                time.time() - service.started,
                service.loader.names[0],
                address,
            )
        elif progress.phase == "failed":
            server.load_failed()

    service = Service(settings, loader or ModelLoader(settings), on_progress, Notifier())
    server = DrainingServer(
        http_config(create_app(service)),
        service,
    )
    address = url_of(listener)
    logger.info("listening on %s, loading %s", address, " ".join(settings.model))
    with listener:
        server.run(sockets=[listener])
    display.close()
    if service.worker.failure is not None:
        report_failure(service.worker.failure)
    if service.worker.is_alive():
        logger.warning("the engine did not stop; exiting without it")
        logging.shutdown()
        os._exit(server.exit_code)
    return server.exit_code


def http_config(app: ASGIApp) -> uvicorn.Config:
    """How the server speaks HTTP, whatever else is installed: uvicorn would take httptools and uvloop where it finds them."""
    return uvicorn.Config(
        app,
        log_config=None,
        access_log=False,
        server_header=False,
        # With httptools answers to HEAD fail (tests/server/test_http_forms.py).
        http="h11",
        loop="asyncio",
        ws="none",
        # Longer than clients and proxies keep an idle connection, so that they close it and never meet it closed.
        timeout_keep_alive=KEEP_ALIVE_SECONDS,
        timeout_graceful_shutdown=SHUTDOWN_SECONDS,
    )


def bind(host: str, port: int) -> socket.socket:
    """A listening socket; port 0 takes a free one.

    Raises:
        OSError: the address is in use or not ours.
    """
    family, kind, protocol, _, address = socket.getaddrinfo(
        host, port, type=socket.SOCK_STREAM, proto=socket.IPPROTO_TCP, flags=socket.AI_PASSIVE
    )[0]
    # With its protocol named, asyncio sets TCP_NODELAY on each connection; with 0, as socket.create_server has it,
    # every small write waits for the client's delayed ACK, 40 ms on Linux.
    listener = socket.socket(family, kind, protocol)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(BACKLOG)
    except OSError:
        listener.close()
        raise
    return listener


def url_of(listener: socket.socket) -> str:
    """The URL a socket answers on."""
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def report_failure(error: BaseException) -> None:
    """Say why the model could not be loaded."""
    if isinstance(error, EXPLAINED):
        sys.stderr.write(f"error: {error}\n")
    else:
        logger.error("loading failed", exc_info=error)
