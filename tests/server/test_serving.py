"""A server process: its socket, its signals, how it drains, and what it exits with."""

from __future__ import annotations

import json
import os
import queue
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING

import httpx
import pytest
from rich.console import Console

from server.serving import bind, serve, url_of
from server.settings import Settings
from tests.fakes import PATIENCE_SECONDS
from tests.server.live_server import SAY_HI, assert_openai_error, content_of, eventually, payloads

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

pytest_plugins = ["tests.server.http_fixtures"]

ROOT = Path(__file__).parents[2]
ENVIRONMENT = {"PATH": os.environ["PATH"], "PYTHONPATH": str(ROOT), "NO_COLOR": "1"}


class Process:
    """A server process and what it wrote to stderr."""

    def __init__(self, *arguments: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-W", "error", "-m", *arguments],
            cwd=ROOT,
            env=ENVIRONMENT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.lines: list[str] = []
        self._new_lines: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def wait_for_line(self, part: str) -> str:
        """The next line that holds `part`."""
        while True:
            line = self._new_lines.get(timeout=PATIENCE_SECONDS)
            if part in line:
                return line

    def open_gate(self) -> None:
        """Let the fake engine say "two"."""
        assert self.process.stdin is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()

    def exit_code(self) -> int:
        """Wait for the end."""
        code = self.process.wait(PATIENCE_SECONDS)
        self._reader.join(PATIENCE_SECONDS)
        return code

    def close(self) -> None:
        """Kill what still runs and close the pipes."""
        if self.process.poll() is None:
            self.process.kill()
        self.exit_code()
        for pipe in (self.process.stdin, self.process.stdout, self.process.stderr):
            if pipe is not None:
                pipe.close()

    def _read(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.lines.append(line)
            self._new_lines.put(line)


@pytest.fixture
def run() -> Iterator[Callable[..., Process]]:
    processes: list[Process] = []

    def start(*arguments: str) -> Process:
        processes.append(Process(*arguments))
        return processes[-1]

    yield start
    for process in processes:
        process.close()


@pytest.fixture
def serving(
    run: Callable[..., Process], model_folder: Path
) -> Callable[..., tuple[Process, httpx.Client]]:
    def start(drain_seconds: float) -> tuple[Process, httpx.Client]:
        settings = Settings(
            model=(str(model_folder),), port=0, context=256, drain_seconds=drain_seconds
        )
        process = run("tests.server.fake_server", settings.model_dump_json())
        url = process.wait_for_line("listening on").split()[3].rstrip(",")
        process.wait_for_line("ready in")
        return process, httpx.Client(base_url=url, timeout=PATIENCE_SECONDS, verify=False)

    return start


def test_sigterm_lets_a_stream_end_and_refuses_new_ones_meanwhile(
    serving: Callable[..., tuple[Process, httpx.Client]],
) -> None:
    process, client = serving(drain_seconds=30)
    body = {"messages": SAY_HI, "stream": True}
    with client, client.stream("POST", "/v1/chat/completions", json=body) as response:
        pieces = response.iter_text()
        text = next(pieces)
        process.process.send_signal(signal.SIGTERM)
        eventually(lambda: client.get("/health").status_code == 503, "health says it drains")
        assert client.get("/health").json() == {"status": "draining"}
        assert client.get("/live").status_code == 200
        refused = client.post("/v1/chat/completions", json=body)
        assert_openai_error(refused, 503, code="server_draining")
        assert "retry-after" in refused.headers
        process.open_gate()
        text += "".join(pieces)
    chunks = payloads(text)
    assert content_of(chunks) == "onetwo"
    assert chunks[-1]["choices"][0]["finish_reason"] == "stop"
    assert process.exit_code() == 0
    assert "Traceback" not in "".join(process.lines)


def test_what_takes_longer_than_the_drain_is_cut_in_band(
    serving: Callable[..., tuple[Process, httpx.Client]],
) -> None:
    process, client = serving(drain_seconds=0.3)
    whole = socket.create_connection((client.base_url.host, client.base_url.port or 0))
    with client, whole:
        body = {"messages": SAY_HI, "stream": True}
        with client.stream("POST", "/v1/chat/completions", json=body) as response:
            pieces = response.iter_text()
            text = next(pieces)
            queued = json.dumps({"messages": SAY_HI}).encode()
            whole.sendall(
                b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\nconnection: close\r\n"
                b"content-type: application/json\r\n"
                b"content-length: %d\r\n\r\n%s" % (len(queued), queued)
            )
            eventually(
                lambda: "torchtpu_requests_waiting 1.0" in client.get("/metrics").text, "it waits"
            )
            process.process.send_signal(signal.SIGTERM)
            text += "".join(pieces)
        *_, last = payloads(text)
        assert last["error"]["code"] == "server_draining"
        assert 'finish_reason":"' not in text
        answer = b""
        while piece := whole.recv(65536):
            answer += piece
    assert answer.startswith(b"HTTP/1.1 503")
    assert b'"code":"server_draining"' in answer
    process.open_gate()
    assert process.exit_code() == 0
    assert "Traceback" not in "".join(process.lines)


def test_a_second_signal_exits_at_once(
    serving: Callable[..., tuple[Process, httpx.Client]],
) -> None:
    process, client = serving(drain_seconds=600)
    with client:
        body = {"messages": SAY_HI, "stream": True}
        with client.stream("POST", "/v1/chat/completions", json=body) as response:
            next(response.iter_text())
            process.process.send_signal(signal.SIGTERM)
            process.wait_for_line("SIGTERM")
            process.process.send_signal(signal.SIGTERM)
            assert process.exit_code() == 128 + signal.SIGTERM
            response.close()


def test_an_idle_server_exits_with_zero_on_ctrl_c(
    serving: Callable[..., tuple[Process, httpx.Client]],
) -> None:
    process, client = serving(drain_seconds=600)
    with client:
        # A kept-alive connection without a request is nothing to wait for.
        assert client.get("/health").status_code == 200
        process.process.send_signal(signal.SIGINT)
        assert process.exit_code() == 0
    assert process.process.stdout is not None
    assert process.process.stdout.read() == ""


def test_a_checkpoint_that_is_not_there_is_one_sentence_and_exit_one(
    run: Callable[..., Process], tmp_path: Path
) -> None:
    process = run("server", "serve", str(tmp_path / "nothing"), "--port", "0")
    assert process.exit_code() == 1
    errors = [line for line in process.lines if line.startswith("error: ")]
    assert len(errors) == 1
    assert "there is no such folder" in errors[0]
    assert "Traceback" not in "".join(process.lines)


def test_a_port_in_use_is_an_os_error_before_anything_loads(model_folder: Path) -> None:
    with bind("127.0.0.1", 0) as taken:
        settings = Settings(model=(str(model_folder),), port=taken.getsockname()[1])
        with pytest.raises(OSError, match="Address already in use"):
            serve(settings, Console(stderr=True))


def test_connections_do_not_wait_for_delayed_acknowledgements() -> None:
    with bind("127.0.0.1", 0) as listener:
        # asyncio turns Nagle's algorithm off only where the protocol is named.
        assert listener.proto == socket.IPPROTO_TCP
        with socket.create_connection(listener.getsockname()), listener.accept()[0] as accepted:
            assert accepted.proto == socket.IPPROTO_TCP


def test_addresses_read_as_urls() -> None:
    with bind("127.0.0.1", 0) as listener:
        assert url_of(listener) == f"http://127.0.0.1:{listener.getsockname()[1]}"
    if socket.has_ipv6:
        try:
            with bind("::1", 0) as listener:
                assert url_of(listener) == f"http://[::1]:{listener.getsockname()[1]}"
        except OSError:
            pytest.skip("this machine has no IPv6 loopback")
