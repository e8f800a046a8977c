"""The shim as a process, as users run it, and what tests ask it. Use with `pytest_plugins = ["tests.rig.served"]` for a server behind it."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from typing import TYPE_CHECKING, Any, Self

import httpx

from rig.settings import ROOT
from tests.fakes import PATIENCE_SECONDS
from tests.server.live_server import read_all

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping


class Process:
    """A process whose lines of stderr are kept; ended with the `with`, however that ends."""

    def __init__(self, *command: str, environment: Mapping[str, str] | None = None) -> None:
        self.lines: list[str] = []
        self._news = threading.Condition()
        self._process = subprocess.Popen(
            command,
            cwd=ROOT,
            env={"PATH": os.environ["PATH"], "OMP_NUM_THREADS": "1", **(environment or {})},
            stderr=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            text=True,
        )
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait(PATIENCE_SECONDS)
        self._reader.join(PATIENCE_SECONDS)
        assert self._process.stderr is not None
        self._process.stderr.close()

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def log(self) -> str:
        """What it has said."""
        return "\n".join(self.lines)

    def said(self, pattern: str) -> re.Match[str]:
        """Waits until it says that."""
        with self._news:
            found = self._news.wait_for(
                lambda: re.search(pattern, self.log) or self._has_ended, 2 * PATIENCE_SECONDS
            )
        assert isinstance(found, re.Match), f"never said {pattern}:\n{self.log}"
        return found

    def end(self, with_signal: int = signal.SIGTERM) -> int:
        """Ends it, and gives its status."""
        self._process.send_signal(with_signal)
        return self._process.wait(PATIENCE_SECONDS)

    def ended(self) -> int:
        """Its status, when it ends by itself."""
        return self._process.wait(2 * PATIENCE_SECONDS)

    @property
    def _has_ended(self) -> bool:
        return not self._reader.is_alive() or self._process.poll() is not None

    def _read(self) -> None:
        assert self._process.stderr is not None
        for line in self._process.stderr:
            with self._news:
                self.lines.append(line.rstrip("\n"))
                self._news.notify_all()
        with self._news:
            self._news.notify_all()


class Shim(Process):
    """`torchtpu-rs-shim` on a free port."""

    def __init__(self, *options: str, environment: Mapping[str, str] | None = None) -> None:
        super().__init__(
            sys.executable, "-m", "demo", "--port", "0", *options, environment=environment
        )
        try:
            self.url = self.said(r"(http://127\.0\.0\.1:\d+) is the chat page")[1]
        except BaseException:
            self.__exit__()
            raise
        self.port = int(self.url.rpartition(":")[2])

    def ask(self, path: str, method: str = "GET", **options: Any) -> httpx.Response:
        """One request on a connection of its own."""
        return httpx.request(
            method, self.url + path, timeout=PATIENCE_SECONDS, trust_env=False, **options
        )

    def status(self) -> dict[str, Any]:
        """Its own."""
        found: dict[str, Any] = self.ask("/shim/status").json()
        return found


class Server(Process):
    """`torchtpu-rs serve` on the embedded model, as a VM has it."""

    def __init__(self, key_file: str, host: str = "127.0.0.1", port: int = 0) -> None:
        super().__init__(
            sys.executable, "-m", "server", "serve", "--host", host, "--port", str(port), "--api-key-file", key_file
        )  # fmt: skip

    def ready(self) -> str:
        """Its address, once it serves."""
        return self.said(r"ready in .* at (http://\S+)/v1")[1]


def eventually(condition: Callable[[], bool], what: str, pause: float = 0.05) -> None:
    """Waits for what another process is about to do."""
    end = time.monotonic() + PATIENCE_SECONDS
    while not condition():
        assert time.monotonic() < end, f"never happened: {what}"
        time.sleep(pause)


def raw(url: str, request: bytes) -> bytes:
    """Everything that comes back for these bytes."""
    host, port = url.removeprefix("http://").split(":")
    with contextlib.closing(
        socket.create_connection((host, int(port)), PATIENCE_SECONDS)
    ) as connection:
        connection.sendall(request)
        return read_all(connection)
