"""The proxy on a real socket, and behind it a next hop that is a bare socket: tests see every byte of it and decide on every one."""

from __future__ import annotations

import contextlib
import queue
import socket
import threading
from typing import TYPE_CHECKING, Any, Self

import httpx
import uvicorn

from rig.proxy import proxy
from tests.fakes import PATIENCE_SECONDS
from tests.server.live_server import read_all

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from starlette.applications import Starlette

OK = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok"
STREAM = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\ntransfer-encoding: chunked\r\n\r\n"
CALLER, UPSTREAM = "the-callers-key", "the-servers-key"


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(data), data)


class Served:
    """An app on a real socket, in a thread."""

    def __init__(self, app: Starlette) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        config = uvicorn.Config(
            app, log_config=None, access_log=False, server_header=False, date_header=False
        )
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(target=self._server.run, args=([self._listener],))

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.should_exit = True
        self._thread.join(PATIENCE_SECONDS)
        assert not self._thread.is_alive(), "the proxy did not stop"
        self._listener.close()


class Hop:
    """The next hop: a bare socket, so that tests see every byte and decide on every one. `play` gets each connection."""

    def __init__(self, play: Callable[[socket.socket], object]) -> None:
        self._play = play
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._listener.settimeout(0.05)
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        self.heads: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        self._ended = threading.Event()
        self._threads = [threading.Thread(target=self._accept)]

    def __enter__(self) -> Self:
        self._threads[0].start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        for thread in self._threads:
            thread.join(PATIENCE_SECONDS)
            assert not thread.is_alive()
        self._listener.close()

    def head(self) -> bytes:
        """Request line and headers of the next request that came."""
        return self.heads.get(timeout=PATIENCE_SECONDS)

    def _accept(self) -> None:
        while not self._ended.is_set():
            with contextlib.suppress(TimeoutError):
                connection = self._listener.accept()[0]
                connection.settimeout(PATIENCE_SECONDS)
                self._threads.append(threading.Thread(target=self._talk, args=(connection,)))
                self._threads[-1].start()

    def _talk(self, connection: socket.socket) -> None:
        with connection:
            data = b""
            while b"\r\n\r\n" not in data:
                piece = connection.recv(1)
                if not piece:
                    return
                data += piece
            self.heads.put(data)
            with contextlib.suppress(ConnectionError):
                self._play(connection)


def has_left(connection: socket.socket) -> bool:
    """Waits until the other side has closed."""
    try:
        return connection.recv(1) == b""
    except ConnectionError:
        return True


@contextlib.contextmanager
def through(url: str, **options: Any) -> Iterator[Served]:
    with Served(proxy(lambda: url, **options)) as served:
        yield served


@contextlib.contextmanager
def passed_to(
    play: Callable[[socket.socket], object], **options: Any
) -> Iterator[tuple[Hop, Served]]:
    with Hop(play) as hop, through(hop.url, **options) as served:
        yield hop, served


def client(served: Served, **options: Any) -> httpx.Client:
    return httpx.Client(base_url=served.url, timeout=PATIENCE_SECONDS, verify=False, **options)


def raw(served: Served, request: bytes) -> bytes:
    with socket.create_connection(("127.0.0.1", served.port), PATIENCE_SECONDS) as connection:
        connection.sendall(request)
        return read_all(connection)


def say(data: bytes) -> Callable[[socket.socket], object]:
    return lambda connection: connection.sendall(data)
