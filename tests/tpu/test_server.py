"""The whole server on the simulated TPU, as a user starts it: it loads, streams, counts, stops, and starts warm."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import openai
import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).parents[2]
QUESTION: Any = [{"role": "user", "content": "What is a TPU?"}]
ANSWER = "A TPU is a Tensor Processing Unit, a chip that Google designed for machine learning. Its matrix units multiply large blocks of numbers at once."
LOADING_SECONDS = 250


class Server:
    """A `torchtpu-rs serve` process on the simulated TPU."""

    def __init__(self, cache: Path, log: Path) -> None:
        command = [
            sys.executable, "-c", "from server.cli import main; main()", "serve", "--device", "tpu", "--simulate-tpu",
            "--port", "0", "--context", "600", "--slots", "2", "--compile-cache", str(cache),
        ]  # fmt: skip
        self.log = log
        with log.open("w") as opened:
            self.process = subprocess.Popen(command, cwd=ROOT, stderr=opened, stdout=opened)
        self.http = httpx.Client(timeout=30)
        self.phases: list[str] = []
        self._wait()

    def _wait(self) -> None:
        until = time.monotonic() + LOADING_SECONDS
        while time.monotonic() < until:
            assert self.process.poll() is None, self.log.read_text()[-3000:]
            found = re.search(r"listening on (http://\S+),", self.log.read_text())
            if found is not None:
                self.http.base_url = httpx.URL(found[1])
                health = self.http.get("/health")
                body = health.json()
                if health.status_code == 200:
                    return
                self.phases.append(f"{body['phase']} {body['done']}/{body['total']}")
            time.sleep(0.2)
        raise AssertionError(f"not ready in time: {self.log.read_text()[-3000:]}")

    def programs(self) -> dict[str, int]:
        """Programs there, and in all."""
        found: dict[str, int] = self.http.get("/health").json()["programs"]
        return found

    def engine(self) -> dict[str, Any]:
        """`/v1/engine`."""
        found: dict[str, Any] = self.http.get("/v1/engine").json()
        return found

    def stop(self) -> int:
        """The exit code after SIGTERM."""
        self.http.close()
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(60)


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("programs")


@pytest.fixture(scope="module")
def server(cache: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    running = Server(cache, tmp_path_factory.mktemp("log") / "cold.log")
    yield running
    if running.process.poll() is None:
        os.kill(running.process.pid, signal.SIGKILL)


def test_loading_is_shown_program_by_program(server: Server) -> None:
    assert any(phase.startswith("compile 0/") for phase in server.phases), server.phases
    assert server.programs()["total"] == 6
    assert server.programs()["ready"] >= 2


def test_an_answer_streams_while_programs_are_still_compiled(server: Server) -> None:
    client = openai.OpenAI(base_url=f"{server.http.base_url}/v1", api_key="none")
    pieces = []
    with client.chat.completions.create(
        model="gemma4-embedded", messages=QUESTION, stream=True
    ) as chunks:
        pieces = [chunk.choices[0].delta.content for chunk in chunks if chunk.choices]
    text = [piece for piece in pieces if piece]
    assert "".join(text) == ANSWER
    assert len(text) > 2


def test_launches_and_compilations_are_counted_for_people_and_for_prometheus(
    server: Server,
) -> None:
    until = time.monotonic() + LOADING_SECONDS
    while server.programs()["ready"] < 6 and time.monotonic() < until:
        time.sleep(0.5)
    body = {"messages": QUESTION}
    before = server.engine()
    assert (
        server.http.post("/v1/chat/completions", json=body).json()["choices"][0]["message"][
            "content"
        ]
        == ANSWER
    )
    after = server.engine()
    assert after["compilations"] == before["compilations"] or before["pending"] > 0
    # A chunk for the prompt, and a launch of at most 32 tokens for the rest.
    assert after["launches"] - before["launches"] <= 5
    assert after["mode"] == "compiled"
    metrics = server.http.get("/metrics").text
    assert f"torchtpu_engine_launches {float(after['launches'])}" in metrics
    assert "torchtpu_engine_compilations 6.0" in metrics


def test_it_stops_cleanly_and_starts_again_without_compiling(
    server: Server, cache: Path, tmp_path: Path
) -> None:
    assert server.stop() == 0
    warm = Server(cache, tmp_path / "warm.log")
    try:
        answer = warm.http.post("/v1/chat/completions", json={"messages": QUESTION}).json()
        assert answer["choices"][0]["message"]["content"] == ANSWER
        engine = warm.engine()
        assert engine["compilations"] == 0
        assert json.dumps(engine["programs"]).count('"from_disk": true') >= 2
    finally:
        assert warm.stop() == 0


def test_doctor_finds_the_simulated_device() -> None:
    command = [sys.executable, "-c", "from server.cli import main; main()", "doctor"]
    command += ["--device", "tpu", "--simulate-tpu", "--json"]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    report = json.loads(run.stdout)
    assert (run.returncode, report["ok"]) == (0, True)
    assert report["checks"]["device"]["device"] == "tpu:0"


def test_a_machine_without_a_tpu_says_so_at_once(tmp_path: Path) -> None:
    command = [sys.executable, "-c", "from server.cli import main; main()", "serve"]
    command += ["--device", "tpu", "--port", "0"]
    run = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=200
    )
    assert run.returncode == 1
    assert "error: expected a TPU on the PCI bus, found none; --simulate-tpu" in " ".join(
        run.stderr.split()
    )


@pytest.mark.parametrize(
    ("flags", "complaint"),
    [
        (["--simulate-tpu"], "simulate_tpu is for --device tpu, found --device cpu"),
        (["--mode", "fused"], "mode is for --device tpu, found --device cpu"),
        (
            ["--device", "tpu", "--mode", "eager", "--weight-format", "int8"],
            "weight_format int8 is for compiled steps",
        ),
        (
            ["--device", "tpu", "--mode", "fast"],
            "--mode: Input should be 'eager', 'fused' or 'compiled'",
        ),
    ],
)
def test_options_that_do_not_go_together_are_named(flags: list[str], complaint: str) -> None:
    command = [sys.executable, "-c", "from server.cli import main; main()", "serve", *flags]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert run.returncode == 78
    assert complaint in " ".join(run.stderr.split())
