"""The real vllm-router as a child process on loopback: started, asked, changed and ended. Knows servers by their addresses only.

Whoever reaches it must have the servers' key: the router asks `KeyCheck`, here, who has. It passes on what callers send to the paths it
knows (chat, completions, models), and its own key to all others, which is why it has to have one.
"""

from __future__ import annotations

import contextlib
import hmac
import importlib.util
import os
import re
import socket
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING

import httpx

from rig.errors import RigError

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

METRICS_PORT = 29000
"""vllm-router's own default."""
START_SECONDS, STOP_SECONDS, ANSWER_SECONDS = 30.0, 5.0, 10.0
LAST_LINES = 8
ANSI = re.compile(r"\x1b\[[0-9;]*m")
PROXIES = frozenset({"http_proxy", "https_proxy", "all_proxy"})

# Found by trying 0.1.17 (tests/rig/test_front.py holds the rest):
#  * A worker that died fails at most three requests, which are tried again elsewhere, up to five times in all; then its circuit is
#    open for five seconds, or until health checks find it again. With the defaults it would get nothing for a minute.
#  * The request timeout is one for whole streams.
#  * The startup interval is also how often it asks servers for /get_load, which ours do not have: loads are then those it counts itself.
FLAGS = (
    *("--policy", "power_of_two"),
    *("--health-check-interval-secs", "5", "--health-check-timeout-secs", "5"),
    *("--health-failure-threshold", "2", "--health-success-threshold", "1"),
    *("--cb-failure-threshold", "3", "--cb-success-threshold", "1"),
    *("--cb-timeout-duration-secs", "5"),
    *("--request-timeout-secs", "86400"),
    *("--worker-startup-timeout-secs", "5", "--worker-startup-check-interval", "60"),
)


class RouterError(RigError):
    """The router does not run, or does not do what it is asked; the text has the end of its log."""


class RouterFailedError(RouterError):
    """It cannot run: a port is taken, or it ended by itself. Trying again will hardly help."""


class Router:
    """One router, of which at most one process runs at a time."""

    def __init__(self, port: int, key: str, log: Path, metrics_port: int = METRICS_PORT) -> None:
        """Start nothing yet. `key` is what its servers ask for, and what it asks for in turn.

        Raises:
            RouterError: vllm-router is not installed.
        """
        if importlib.util.find_spec("vllm_router") is None:
            raise RouterError(
                "expected vllm-router, found none: run `pip install 'torchtpu-rs[fleet]'`"
            )
        self.url = f"http://127.0.0.1:{port}"
        self.key = key
        self._port, self._metrics_port, self._log = port, metrics_port, log
        self._process: subprocess.Popen[bytes] | None = None
        self._check = KeyCheck(key)
        self._client = httpx.Client(
            base_url=self.url,
            headers={"authorization": f"Bearer {key}"},
            timeout=ANSWER_SECONDS,
            trust_env=False,
        )

    @property
    def ended(self) -> int | None:
        """The status it ended with by itself; None while it runs, or was never started."""
        return self._process.poll() if self._process else None

    @property
    def is_running(self) -> bool:
        """There is a process."""
        return self._process is not None and self._process.poll() is None

    def start(self, workers: Sequence[str]) -> None:
        """Run it with `workers`, of which there must be one; returns when it answers.

        On Linux it ends with the thread that calls this, at the latest.

        Raises:
            RouterFailedError: a port of its is taken, or it ended.
            RouterError: it does not answer in time; it waits for a worker that does.
        """
        self.stop()
        for port in (self._port, self._metrics_port):
            _check_free(port)
        # power_of_two wants two; the same one twice counts as two and is then one.
        urls = [*workers, *workers] if len(workers) == 1 else list(workers)
        command = [
            *(sys.executable, "-m", "rig.router_process", str(os.getpid()), self._check.url),
            *("--host", "127.0.0.1", "--port", str(self._port)),
            *("--prometheus-host", "127.0.0.1", "--prometheus-port", str(self._metrics_port)),
            *FLAGS,
            *("--worker-urls", *urls),
        ]
        # The addresses of servers are used as they are.
        environment = {key: text for key, text in os.environ.items() if key.lower() not in PROXIES}
        self._log.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=environment,
                # Ctrl-C is for the parent, which lets streams end first.
                start_new_session=True,
            )
        try:
            assert self._process.stdin is not None
            with contextlib.suppress(BrokenPipeError), self._process.stdin as stdin:
                # If it has ended already, its log says why.
                stdin.write(f"{self.key}\n".encode())
            self._wait_until_it_answers(self._process)
        except BaseException:
            self.stop()
            raise

    def _wait_until_it_answers(self, process: subprocess.Popen[bytes]) -> None:
        end = time.monotonic() + START_SECONDS
        while time.monotonic() < end:
            with contextlib.suppress(httpx.TransportError):
                # 503 while no worker is healthy.
                if self._client.get("/readiness", timeout=1.0).status_code in {200, 503}:
                    return
            with contextlib.suppress(subprocess.TimeoutExpired):
                status = process.wait(0.05)
                raise RouterFailedError(
                    f"expected vllm-router to serve on {self.url}, found that it ended with status {status}: {self.last_words()}"
                )
        raise RouterError(
            f"expected vllm-router to answer on {self.url} in {START_SECONDS:g} s, found nothing: {self.last_words()}"
        )

    def workers(self) -> frozenset[str]:
        """The servers it knows.

        Raises:
            RouterError: it does not say.
        """
        answer = self._ask("GET", "/list_workers")
        return frozenset(answer.json()["urls"])

    def add(self, worker: str) -> None:
        """Give requests to `worker` too; it must be healthy.

        Raises:
            RouterError: the router does not take it.
        """
        self._ask("POST", "/add_worker", worker)

    def remove(self, worker: str) -> None:
        """Give no more requests to `worker`; streams that run go on.

        Raises:
            RouterError: the router does not answer.
        """
        self._ask("POST", "/remove_worker", worker)

    def _ask(self, method: str, path: str, worker: str | None = None) -> httpx.Response:
        try:
            answer = self._client.request(method, path, params={"url": worker} if worker else None)
        except httpx.TransportError as error:
            raise RouterError(f"expected vllm-router to answer {path}, found {error!r}") from error
        if not answer.is_success:
            raise RouterError(f"vllm-router refused {path} {worker or ''}: {answer.text[:300]}")
        return answer

    def last_words(self) -> str:
        """The end of its log."""
        try:
            lines = ANSI.sub("", self._log.read_text(errors="replace")).splitlines()
        except OSError as error:
            return f"no log ({error})"
        return " | ".join(line for line in lines[-LAST_LINES:] if line.strip()) or "an empty log"

    def stop(self) -> None:
        """End the process, if there is one."""
        process, self._process = self._process, None
        if process is None:
            return
        if process.stdin is not None:
            process.stdin.close()
        process.terminate()
        try:
            process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            # It waits for streams whose callers are slow.
            process.kill()
            process.wait()

    def close(self) -> None:
        """End everything for good."""
        self.stop()
        self._client.close()
        self._check.close()


def _check_free(port: int) -> None:
    """Asked before the router is started: another one on the port would answer in its place."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError as error:
            raise RouterFailedError(
                f"expected to run vllm-router on 127.0.0.1:{port}, found {error.strerror}"
            ) from error


class KeyCheck:
    """A listener of its own on loopback, which the router asks about each new caller: 200 for who has the key, 401 for others."""

    def __init__(self, key: str) -> None:
        expected = f"Bearer {key}".encode()

        class Answer(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                offered = (self.headers.get("Authorization") or "").encode("latin-1", "replace")
                self.send_response(200 if hmac.compare_digest(offered, expected) else 401)
                self.send_header("Content-Length", "0")
                self.end_headers()

            def log_message(self, *_: object) -> None:
                """Nothing is logged."""

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Answer)
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}/"
        self._thread = threading.Thread(
            target=self._server.serve_forever, args=(0.1,), name="key-check", daemon=True
        )
        self._thread.start()

    def close(self) -> None:
        """Stop listening."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
