"""systemd hears when the server loads, is ready, lives and stops, and that a hung engine is silent."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
from typing import TYPE_CHECKING

import pytest

from models import EMBEDDED
from server.notify import Notifier
from server.worker import EngineWorker, Progress

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


class Manager:
    """The other end of NOTIFY_SOCKET."""

    def __init__(self, address: str) -> None:
        self.address = address
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.socket.bind("\0" + address[1:] if address.startswith("@") else address)
        self.socket.settimeout(60)

    def hear(self) -> list[str]:
        """The lines of the next message."""
        return self.socket.recv(4096).decode().splitlines()

    def hear_until(self, line: str) -> list[str]:
        heard: list[str] = []
        while line not in heard:
            heard += self.hear()
        return heard


@pytest.fixture
def manager(tmp_path: Path) -> Iterator[Manager]:
    found = Manager(str(tmp_path / "notify"))
    yield found
    found.socket.close()


def test_without_systemd_nothing_is_said_and_nothing_fails() -> None:
    silent = Notifier({})
    silent.progress(Progress("ready", 1, 1))
    silent.alive()
    silent.stopping()
    assert silent.alive_every == 0


def test_loading_asks_for_more_time_and_ready_ends_it(manager: Manager) -> None:
    notifier = Notifier({"NOTIFY_SOCKET": manager.address})
    notifier.progress(Progress("weights", 7, 35))
    assert manager.hear() == ["STATUS=weights: 20%", "EXTEND_TIMEOUT_USEC=600000000"]
    notifier.progress(Progress("ready", 1, 1))
    assert manager.hear() == ["READY=1", "STATUS=serving"]
    notifier.progress(Progress("failed"))
    assert manager.hear() == ["STATUS=loading failed"]
    notifier.stopping()
    assert manager.hear()[0] == "STOPPING=1"


def test_addresses_without_a_file_work_too() -> None:
    manager = Manager(f"@torchtpu-test-{os.getpid()}")
    Notifier({"NOTIFY_SOCKET": manager.address}).stopping()
    assert manager.hear()[0] == "STOPPING=1"
    manager.socket.close()


def test_signs_of_life_come_three_times_as_often_as_the_watchdog_wants_and_only_from_its_process(
    manager: Manager,
) -> None:
    environment = {"NOTIFY_SOCKET": manager.address, "WATCHDOG_USEC": "3000000"}
    notifier = Notifier({**environment, "WATCHDOG_PID": str(os.getpid())})
    assert notifier.alive_every == 1
    for _ in range(100):
        notifier.alive()
    assert manager.hear() == ["WATCHDOG=1"]
    manager.socket.settimeout(0.01)
    with pytest.raises(TimeoutError):
        manager.hear()
    assert Notifier({**environment, "WATCHDOG_PID": "1"}).alive_every == 0


def test_a_manager_that_is_gone_does_not_stop_the_server(tmp_path: Path) -> None:
    Notifier({"NOTIFY_SOCKET": str(tmp_path / "none")}).stopping()


def test_an_idle_engine_lives_and_one_that_hangs_in_a_step_does_not() -> None:
    alive = threading.Semaphore(0)
    entered, release = threading.Event(), threading.Event()

    class Engine:
        def info(self) -> dict[str, object]:
            return {}

        def decode(self, *_: object) -> object:
            entered.set()
            assert release.wait(60)
            raise ValueError("over")

    from server.engine import Job

    worker = EngineWorker(lambda _: Engine(), max_queue=1, on_alive=alive.release, alive_every=0.01)  # type: ignore[arg-type, return-value]
    worker.start()
    for _ in range(3):
        assert alive.acquire(timeout=60)
    worker.submit(Job([1], 1, [], lambda _: None))
    assert entered.wait(60)
    while alive.acquire(blocking=False):
        pass
    assert not alive.acquire(timeout=0.1)
    release.set()
    assert alive.acquire(timeout=60)
    worker.stop()
    worker.join(60)


def test_a_server_process_goes_through_loading_ready_alive_and_stopping(manager: Manager) -> None:
    command = [sys.executable, "-m", "server", "serve", str(EMBEDDED), "--port", "0"]
    environment = {**os.environ, "NOTIFY_SOCKET": manager.address, "WATCHDOG_USEC": "300000"}
    process = subprocess.Popen(command, env=environment, stderr=subprocess.DEVNULL)
    try:
        loading = manager.hear_until("READY=1")
        assert any(line.startswith("STATUS=weights: ") for line in loading)
        assert any(line.startswith("EXTEND_TIMEOUT_USEC=") for line in loading)
        for _ in range(3):
            manager.hear_until("WATCHDOG=1")
        process.send_signal(signal.SIGTERM)
        manager.hear_until("STOPPING=1")
        assert process.wait(60) == 0
    finally:
        process.kill()
        process.wait()
