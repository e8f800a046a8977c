"""The shim's process: options that are wrong, a port that is taken, what systemd hears, and how it ends."""

from __future__ import annotations

import signal
import socket
import sys
from typing import TYPE_CHECKING

import httpx
import pytest

from tests.demo.shims import Process, Shim
from tests.fakes import PATIENCE_SECONDS
from tests.rig.hops import STREAM, Hop, chunk, has_left
from tests.server.test_notify import Manager

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

EX_CONFIG = 78


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (["--url", "http://127.0.0.1:1", "--router", "http://127.0.0.1:2"], "expected --url or --router, found both"),
        (["--url", "127.0.0.1:8000"], "expected an address like http://127.0.0.1:8000, found '127.0.0.1:8000'"),
        (["--url", "http://user:secret@host"], "expected an address like"),
        (["--url", "http://127.0.0.1:1", "--api-key-file", "/no/such"], "expected an API key in /no/such, found: No such file"),
        (["--url", "http://127.0.0.1:1", "--port", "99999"], "expected to listen on 127.0.0.1:99999"),
    ],
)  # fmt: skip
def test_options_that_are_wrong_end_it_with_a_status_that_systemd_knows(
    options: list[str], told: str
) -> None:
    with Process(sys.executable, "-m", "demo", *options) as process:
        assert process.ended() == EX_CONFIG
    assert told in process.log
    assert "Traceback" not in process.log


def test_a_port_that_is_taken_is_told() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with Process(
            sys.executable, "-m", "demo", "--port", str(port), "--url", "http://127.0.0.1:1"
        ) as process:
            assert process.ended() == EX_CONFIG
    assert f"expected to listen on 127.0.0.1:{port}, found: [Errno 98]" in process.log  # fmt: skip


@pytest.fixture
def manager(tmp_path: Path) -> Iterator[Manager]:
    found = Manager(str(tmp_path / "notify"))
    yield found
    found.socket.close()


def test_systemd_hears_when_it_listens_lives_and_stops(manager: Manager) -> None:
    environment = {"NOTIFY_SOCKET": manager.address, "WATCHDOG_USEC": "200000"}
    with Shim("--url", "http://127.0.0.1:1", environment=environment) as shim:
        assert manager.hear()[0] == "READY=1"
        # It may be asked from then on.
        assert shim.ask("/shim/status").status_code == 200
        for _ in range(3):
            assert manager.hear() == ["WATCHDOG=1"]
        shim.end()
        manager.hear_until("STOPPING=1")


def test_a_signal_ends_it_and_a_running_stream_does_not_look_whole() -> None:
    left = []

    def play(connection: socket.socket) -> None:
        connection.sendall(STREAM + chunk(b"data: one\n\n"))
        left.append(has_left(connection))

    with (
        Hop(play) as hop,
        Shim("--url", hop.url) as shim,
        httpx.stream("GET", f"{shim.url}/v1", timeout=PATIENCE_SECONDS) as answer,
    ):
        pieces = answer.iter_raw()
        assert next(pieces) == b"data: one\n\n"
        assert shim.end() == -signal.SIGTERM
        with pytest.raises(httpx.RemoteProtocolError):
            list(pieces)
    assert left == [True]
    assert "Traceback" not in shim.log
