"""The real unit under a real systemd, with the real server and the embedded model on port 8000: ready, killed, stopped, hung, wrong."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest

from rig.settings import ROOT
from tests.rig import machine as machines
from tests.rig.machine import TREE, Machine

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

UNIT = "torchtpu-rs.service"
UNITS = sorted((ROOT / "rig").glob("*.service"))
KEY = "key-of-this-test-0123456789"
SETTINGS = {
    "TORCHTPU_MODEL": f"{TREE}/models/gemma4-embedded",
    "TORCHTPU_DEVICE": "cpu",
    "TORCHTPU_CONTEXT": "4096",
    "TORCHTPU_PORT": "8000",
}
SAY = [{"role": "user", "content": "Say hi."}]


class Vm:
    """A machine that has what startup.sh installs, and a client on it."""

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        machine.add_python("/opt/torchtpu-rs/venv")
        machine.run("useradd", "--system", "--user-group", "--no-create-home", "torchtpu")
        machine.write("/etc/torchtpu-rs/api-key", f"{KEY}\n", 0o600)
        machine.write(f"/etc/systemd/system/{UNIT}", (ROOT / "rig" / UNIT).read_text())
        self.configure()

    def configure(self, drop_in: str = "", **changed: str) -> None:
        """Its serve.env, and what else differs from the unit for one test."""
        lines = {**SETTINGS, **changed}.items()
        self.machine.write(
            "/etc/torchtpu-rs/serve.env", "".join(f"{key}={value}\n" for key, value in lines)
        )
        self.machine.write(f"/run/systemd/system/{UNIT}.d/test.conf", drop_in)
        self.machine.run("systemctl", "daemon-reload")

    def systemctl(self, verb: str, *options: str) -> None:
        self.machine.run("systemctl", *options, verb, UNIT)

    def start(self) -> None:
        """Returns when systemd has heard READY=1; earlier tests' starts do not count."""
        self.machine.run("systemctl", "reset-failed")
        self.systemctl("start")

    def show(self, name: str) -> str:
        return self.machine.show(UNIT, name)

    @property
    def pid(self) -> str:
        """Of the server, as the machine counts."""
        return self.show("MainPID")

    def ask(self, path: str) -> int:
        """The status of a request; 0 when nobody answers."""
        return self.machine.ask(path)[0]

    def is_healthy(self) -> bool:
        return self.ask("/health") == 200

    def chat(self, key: str | None = KEY) -> tuple[int, Any]:
        status, text = self.machine.ask("/v1/chat/completions", {"messages": SAY}, key)
        return status, json.loads(text)


@pytest.fixture(scope="module")
def vm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Vm]:
    if reason := machines.lacking():
        pytest.skip(f"a systemd of its own {reason}")
    with Machine(tmp_path_factory.mktemp("vm") / "machine") as machine:
        yield Vm(machine)


@pytest.fixture
def serving(vm: Vm) -> Vm:
    """The unit as it is, and it answers."""
    vm.configure()
    vm.start()
    return vm


def test_systemd_calls_it_started_when_it_answers_and_not_before(vm: Vm) -> None:
    vm.systemctl("start", "--no-block")
    vm.machine.eventually(lambda: vm.show("ActiveState") == "activating", "it starts")
    vm.machine.eventually(lambda: vm.ask("/health") == 503, "it listens while it loads")
    assert vm.show("ActiveState") == "activating"
    vm.start()
    assert vm.is_healthy()
    assert (vm.show("ActiveState"), vm.show("NRestarts")) == ("active", "0")
    assert '"serving"' in vm.machine.run("systemctl", "status", "--no-pager", UNIT)


def test_it_answers_with_the_key_of_its_credential_and_to_nobody_else(serving: Vm) -> None:
    status, answer = serving.chat()
    assert status == 200
    assert answer["choices"][0]["finish_reason"] == "stop"
    for wrong in (None, "another"):
        status, refusal = serving.chat(wrong)
        assert (status, refusal["error"]["code"]) == (401, "invalid_api_key")


def test_its_key_is_in_no_argument_variable_or_journal(serving: Vm) -> None:
    for place in ("cmdline", "environ"):
        text = serving.machine.path(f"/proc/{serving.pid}/{place}").read_bytes()
        assert b"torchtpu" in text
        assert KEY.encode() not in text
    assert KEY not in serving.machine.journal(UNIT)
    assert serving.machine.run("stat", "--format=%a %U", "/etc/torchtpu-rs/api-key") == "600 root"


def test_it_runs_as_its_own_user_without_privileges_and_writes_its_folders_only(
    serving: Vm,
) -> None:
    status = serving.machine.path(f"/proc/{serving.pid}/status").read_text()
    user = serving.machine.run("id", "-u", "torchtpu")
    facts = dict(re.findall(r"^(\w+):\t(.*)$", status, re.MULTILINE))
    assert facts["Uid"].split() == [user] * 4
    assert (int(facts["CapEff"], 16), int(facts["CapBnd"], 16)) == (0, 0)
    assert (facts["NoNewPrivs"], facts["Seccomp"]) == ("1", "2")
    # As root of the machine, and inside what the service sees.
    inside = ("nsenter", f"--target={serving.pid}", "--mount", "sh", "-c")
    for folder in ("/etc", "/usr", "/opt/torchtpu-rs", "/root"):
        refused = serving.machine.try_run(*inside, f"touch {folder}/new")
        assert refused.returncode != 0, folder
    for folder in ("/var/lib", "/var/cache", "/var/log"):
        serving.machine.run(*inside, f"touch {folder}/torchtpu-rs/new")
        assert serving.machine.run("stat", "--format=%U", f"{folder}/torchtpu-rs") == "torchtpu"
    serving.machine.run(*inside, "touch /tmp/private")
    assert not serving.machine.path("/tmp/private").exists()


def test_a_killed_server_is_started_again(serving: Vm) -> None:
    before, restarts = serving.pid, int(serving.show("NRestarts"))
    serving.machine.run("kill", "-KILL", before)
    serving.machine.eventually(
        lambda: int(serving.show("NRestarts")) == restarts + 1, "systemd starts it again"
    )
    serving.machine.eventually(serving.is_healthy, "it answers again")
    assert serving.chat()[0] == 200
    assert serving.pid not in ("0", before)


def test_stopping_lets_a_running_stream_end_and_takes_nothing_new(serving: Vm) -> None:
    body = {"prompt": "Once", "max_tokens": 600, "ignore_eos": True, "stream": True}
    stream = serving.machine.start(
        "curl", "-sSN", "-m", "60", "-H", f"Authorization: Bearer {KEY}",
        "-H", "Content-Type: application/json", "-d", json.dumps(body), "http://127.0.0.1:8000/v1/completions",
    )  # fmt: skip
    with stream:
        assert stream.stdout is not None
        first = stream.stdout.readline()
        assert first.startswith("data: ")
        serving.systemctl("stop", "--no-block")
        serving.machine.eventually(
            lambda: serving.show("StatusText") == "finishing running requests", "STOPPING=1"
        )
        assert serving.show("SubState") == "stop-sigterm"
        assert serving.chat()[0] == 503
        frames = [line for line in stream.stdout if line.startswith("data: ")]
    assert frames[-1].strip() == "data: [DONE]"
    last = json.loads(frames[-2].removeprefix("data: "))
    assert last["choices"][0]["finish_reason"] == "length"
    serving.machine.eventually(lambda: serving.show("ActiveState") == "inactive", "it ends")
    assert (serving.show("Result"), serving.show("ExecMainStatus")) == ("success", "0")


def test_a_hung_server_is_killed_by_the_watchdog_and_started_again(vm: Vm) -> None:
    vm.systemctl("stop")
    # As in the unit, in less time.
    vm.configure("[Service]\nWatchdogSec=4\nRestartSec=100ms\n")
    vm.start()
    before = vm.pid
    vm.machine.run("kill", "-STOP", before)
    vm.machine.eventually(lambda: vm.show("NRestarts") != "0", "the watchdog ends it")
    vm.machine.eventually(vm.is_healthy, "it answers again")
    assert vm.pid not in ("0", before)
    journal = vm.machine.journal(UNIT)
    assert "Watchdog timeout" in journal
    # Where it hung is written down.
    assert "Fatal Python error: Aborted" in journal


def test_wrong_settings_end_it_once_and_for_all(vm: Vm) -> None:
    vm.systemctl("stop")
    vm.configure(TORCHTPU_CONTEXT="1")
    vm.machine.run("systemctl", "reset-failed")
    assert vm.machine.try_run("systemctl", "start", UNIT).returncode != 0
    assert (vm.show("ExecMainStatus"), vm.show("SubState")) == ("78", "failed")
    assert vm.show("NRestarts") == "0"
    assert "--context: " in vm.machine.journal(UNIT)


def test_without_a_key_it_does_not_start(vm: Vm) -> None:
    vm.systemctl("stop")
    vm.configure("[Service]\nRestart=no\n")
    key = vm.machine.path("/etc/torchtpu-rs/api-key")
    key.unlink()
    try:
        assert vm.machine.try_run("systemctl", "start", UNIT).returncode != 0
        assert vm.ask("/health") == 0
    finally:
        vm.machine.write("/etc/torchtpu-rs/api-key", KEY, 0o600)


@pytest.fixture
def analyze() -> str:
    found = shutil.which("systemd-analyze")
    if found is None:
        pytest.skip("needs systemd-analyze")
    return found


@pytest.mark.parametrize("unit", UNITS, ids=lambda unit: unit.name)
def test_systemd_understands_every_line_of_a_unit(analyze: str, unit: Path, tmp_path: Path) -> None:
    installed = tmp_path / unit.name
    # The program is there on a VM only.
    installed.write_text(
        re.sub(r"/opt/torchtpu-rs/venv/bin/[\w-]+", sys.executable, unit.read_text())
    )
    done = subprocess.run(
        [analyze, "verify", str(installed)], capture_output=True, text=True, check=False
    )
    # It ends with 0 for a key that it does not know.
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("unit", UNITS, ids=lambda unit: unit.name)
def test_a_unit_is_hardened(analyze: str, unit: Path) -> None:
    done = subprocess.run(
        [analyze, "security", "--offline=true", "--threshold=20", "--no-pager", str(unit)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout
