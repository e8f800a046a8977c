"""A VM that nobody asks, or whose time is over, deletes itself; one that is at work, or whose load nobody can read, never."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

import httpx
import pytest

from rig.api import TpuApi
from rig.bundle import settings_text
from rig.google import Google
from rig.keeper import Age, Keeper, Load, ServerError, is_needed, load
from rig.keeper import publish as publish_attribute
from rig.plan import plan
from rig.settings import ROOT, Settings
from rig.tokens import MetadataTokens
from server.metrics import Metrics
from tests.rig.fake_http import Door, Handler
from tests.rig.fake_tpu import FakeTpu, RefusedError, metadata_door, rest_door, services

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.rig.served import Served

pytest_plugins = ["tests.rig.served"]

NAME = "projects/my-project/locations/us-west4-a/queuedResources/gemma4-rust-qr"
NODE = "projects/my-project/locations/us-west4-a/nodes/gemma4-rust-qr-node"
NOON = datetime(2026, 12, 1, 12, tzinfo=UTC)
DENIED = RefusedError(
    403, "PERMISSION_DENIED", "Permission 'tpu.queuedresources.delete' denied on resource"
)


class Vm:
    """A VM that serves: its metadata server, its service account, its server and a clock that the test moves."""

    def __init__(self, tpu: FakeTpu, google: Google, **changed: Any) -> None:
        self.settings = Settings(project_id="my-project", **changed)
        self.tpu = tpu
        self.seconds = 0.0
        self.load: Load | ServerError | None = Load(0, is_busy=False)
        self.said: list[str] = []
        self.keeper = Keeper(
            self.settings, TpuApi(google),
            look=self.look, age=lambda: self.seconds, publish=self.publish,
            clock=lambda: self.seconds, sleep=self.sleep, today=lambda: NOON + timedelta(seconds=self.seconds),
        )  # fmt: skip

    def look(self) -> Load | None:
        if isinstance(self.load, ServerError):
            raise self.load
        return self.load

    def publish(self, text: str) -> None:
        self.said.append(text)
        publish_attribute(text)

    def sleep(self, seconds: float) -> None:
        self.seconds += seconds

    def runs_until(self, minutes: float) -> bool:
        """Whether the keeper was done by then."""
        while self.seconds < minutes * 60:
            if self.keeper.tick():
                return True
            self.seconds += 30
        return False

    @property
    def is_there(self) -> bool:
        return NAME in self.tpu.resources

    @property
    def attribute(self) -> str:
        return self.tpu.attributes.get(NODE, {}).get("rig/keeper", "")


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[FakeTpu, Google]]:
    tpu = FakeTpu(good_tokens=set())
    with (
        rest_door(tpu) as door,
        metadata_door(tpu, NODE, {}) as metadata,
        Google(MetadataTokens(), sleep=lambda _: None) as google,
    ):
        for key, value in {**services(door), "GCE_METADATA_HOST": metadata.address}.items():
            monkeypatch.setenv(key, value)
        created = plan(Settings(project_id="my-project"), {})
        tpu.create(created.parent, {"queuedResourceId": created.queued_resource_id}, created.body)
        tpu.tick(to="ACTIVE")
        yield tpu, google


@pytest.fixture
def vm(world: tuple[FakeTpu, Google]) -> Vm:
    """Idle for thirty minutes at most."""
    return Vm(*world, idle_minutes=30)


def test_an_idle_vm_warns_and_then_deletes_itself_with_its_queued_resource(vm: Vm) -> None:
    assert not vm.runs_until(25)
    assert vm.attribute == ""
    assert not vm.runs_until(29.5)
    assert vm.attribute == "idle 29 of 30 min: deleted at 12:30 UTC unless asked"
    assert vm.is_there
    assert vm.said[0] == "idle 25 of 30 min: deleted at 12:30 UTC unless asked"
    assert not vm.runs_until(30.5)
    assert not vm.is_there
    assert vm.said[-1] == "idle 30 of 30 min: being deleted"
    assert vm.runs_until(40)
    # Ten queries a minute are allowed: one for each minute of the warning, the end, and the question whether it came.
    assert len(vm.said) == 7


def test_the_owner_reads_the_warning_in_the_status(vm: Vm, world: tuple[FakeTpu, Google]) -> None:
    vm.runs_until(26)
    boot = TpuApi(world[1]).boot(NODE)
    assert boot.keeper == "idle 25 of 30 min: deleted at 12:30 UTC unless asked"


def test_a_request_starts_the_idle_time_anew_and_takes_the_warning_back(vm: Vm) -> None:
    vm.runs_until(28)
    vm.load = Load(1, is_busy=False)
    vm.runs_until(29)
    assert vm.attribute == "asked again, nothing is due"
    assert not vm.runs_until(57.5)
    assert vm.is_there
    vm.runs_until(59)
    assert not vm.is_there


def test_a_long_answer_or_a_full_queue_is_not_idle(vm: Vm) -> None:
    vm.load = Load(7, is_busy=True)
    vm.runs_until(600)
    assert vm.is_there
    assert vm.said == []


def test_a_server_that_starts_anew_counts_no_request_and_one_that_stays_down_is_idle(
    vm: Vm,
) -> None:
    vm.load = Load(7, is_busy=False)
    vm.runs_until(10)
    vm.load = Load(0, is_busy=False)
    vm.runs_until(20)
    vm.load = None
    vm.runs_until(24)
    assert vm.attribute == "the server does not answer"
    vm.runs_until(31)
    assert not vm.is_there


def test_a_boot_is_not_idle_until_its_hour_is_over(vm: Vm) -> None:
    vm.load = None
    vm.runs_until(59)
    assert vm.is_there
    assert vm.said == []
    vm.runs_until(61)
    assert not vm.is_there
    assert vm.said[-1] == "idle 60 of 30 min: being deleted"


def test_a_boot_that_ends_well_has_its_whole_idle_time(vm: Vm) -> None:
    vm.load = None
    vm.runs_until(50)
    vm.load = Load(0, is_busy=False)
    vm.runs_until(79)
    assert vm.is_there
    vm.runs_until(81)
    assert not vm.is_there


def test_a_server_whose_load_cannot_be_read_is_never_deleted_on_a_guess(vm: Vm) -> None:
    vm.load = ServerError("expected metrics from the server, found HTTP 401")
    vm.runs_until(600)
    assert vm.is_there
    assert vm.said == ["idle time is not counted: expected metrics from the server, found HTTP 401"]


def test_an_account_that_may_not_delete_says_which_role_it_needs_and_tries_on(vm: Vm) -> None:
    vm.runs_until(29.9)
    vm.tpu.next_answers = [None, DENIED]
    vm.runs_until(34)
    assert "and not deleted: the VM's service account needs roles/tpu.admin in my-project" in (
        vm.attribute
    )
    assert vm.is_there
    deletes = [call for call in vm.tpu.calls if call.method == "DELETE"]
    assert len(deletes) == 1
    vm.runs_until(36)
    assert not vm.is_there


def test_a_request_after_a_refusal_keeps_the_vm(vm: Vm) -> None:
    vm.runs_until(29.9)
    vm.tpu.next_answers = [None, DENIED]
    vm.runs_until(31)
    vm.load = Load(1, is_busy=False)
    vm.runs_until(55)
    assert vm.is_there
    assert vm.attribute == "asked again, nothing is due"


def test_a_vm_without_an_account_says_so(vm: Vm) -> None:
    vm.tpu.vm_has_account = False
    vm.runs_until(31)
    assert "set SERVICE_ACCOUNT" in vm.attribute
    assert vm.is_there


def test_what_is_not_labelled_ours_is_left_alone(vm: Vm) -> None:
    vm.tpu.resources[NAME]["tpu"]["nodeSpec"][0]["node"]["labels"] = {"rig": "another"}
    vm.runs_until(60)
    assert vm.is_there
    assert "is not labelled rig=gemma4-rust" in vm.attribute


def test_a_deletion_that_was_accepted_and_not_done_is_asked_for_again(vm: Vm) -> None:
    created = dict(vm.tpu.resources[NAME])
    vm.runs_until(30.5)
    assert not vm.is_there
    vm.tpu.resources[NAME] = created
    vm.runs_until(36)
    assert not vm.is_there


@pytest.mark.parametrize("model", ["spot", "on-demand", "reserved"])
def test_what_does_not_end_by_itself_is_deleted_when_its_time_is_over(
    world: tuple[FakeTpu, Google], model: str
) -> None:
    vm = Vm(*world, provisioning_model=model, max_run_duration="2h")
    vm.load = Load(1, is_busy=True)
    vm.runs_until(116)
    assert vm.attribute == "ran 1.9 of 2 h: deleted at 14:00 UTC"
    assert vm.is_there
    vm.runs_until(121)
    assert not vm.is_there


def test_flex_start_is_left_to_the_service_which_ends_it(world: tuple[FakeTpu, Google]) -> None:
    vm = Vm(*world, idle_minutes=600)
    vm.load = Load(1, is_busy=True)
    vm.runs_until(5 * 60)
    assert vm.is_there
    assert not is_needed(Settings(project_id="my-project"))
    assert is_needed(vm.settings)
    assert is_needed(Settings(project_id="my-project", provisioning_model="spot"))


class Proc:
    """/proc of a VM that boots."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (folder / "sys/kernel/random").mkdir(parents=True)

    def boots(self, boot_id: str, uptime: float) -> None:
        (self.folder / "sys/kernel/random/boot_id").write_text(f"{boot_id}\n")
        self.runs(uptime)

    def runs(self, uptime: float) -> None:
        (self.folder / "uptime").write_text(f"{uptime} 12.00\n")


def test_a_reboot_or_a_restart_does_not_make_the_vm_younger(tmp_path: Path) -> None:
    proc = Proc(tmp_path / "proc")
    proc.boots("one", 600)
    age = Age(tmp_path, proc.folder)
    assert age.seconds() == 600
    proc.runs(900)
    assert age.seconds() == 900
    assert Age(tmp_path, proc.folder).seconds() == 900
    proc.boots("two", 30)
    assert Age(tmp_path, proc.folder).seconds() == 930
    proc.runs(60)
    assert Age(tmp_path, proc.folder).seconds() == 960
    proc.boots("three", 10)
    assert Age(tmp_path, proc.folder).seconds() == 970
    # A file that was half written is that boot's age at least.
    (tmp_path / "keeper.json").write_text("{")
    assert Age(tmp_path, proc.folder).seconds() == 10


def test_a_disk_that_is_full_keeps_no_vm_alive(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    proc = Proc(tmp_path / "proc")
    proc.boots("one", 600)
    assert Age(tmp_path / "missing", proc.folder).seconds() == 600
    assert "expected to write" in caplog.text


def test_the_servers_own_metrics_say_what_it_has_done_and_does() -> None:
    metrics = Metrics()
    facts = {"running": 0.0, "waiting": 0.0}
    metrics.watch(
        running=lambda: facts["running"], waiting=lambda: facts["waiting"],
        cache_usage=lambda: 0.0, engine=dict,
    )  # fmt: skip

    class Server(Handler):
        def do_GET(self) -> None:  # noqa: N802
            if self.headers.get("Authorization") != "Bearer key":
                self.answer(401, b"{}", "application/json")
            elif self.path == "/metrics":
                self.answer(200, metrics.exposition(), "text/plain")

    with Door(Server) as door:
        url = f"http://{door.address}"
        assert load(url, "key") == Load(0, is_busy=False)
        metrics.answered("chat.completions", "stop", 200)
        metrics.answered("completions", "cancelled", 499)
        metrics.http_opened()
        facts["running"] = 1.0
        assert load(url, "key") == Load(2, is_busy=True)
        facts.update(running=0.0, waiting=3.0)
        assert load(url, "key") == Load(2, is_busy=True)
        with pytest.raises(ServerError, match="HTTP 401"):
            load(url, None)
        metrics = Metrics()
        with pytest.raises(ServerError, match="torchtpu_requests_running"):
            load(url, "key")
    assert load(url, "key") is None


def test_the_real_server_is_seen_to_serve_and_then_to_be_idle(served: Served) -> None:
    before = load(served.url, served.key)
    assert before is not None
    assert not before.is_busy
    answer = httpx.post(
        f"{served.url}/v1/completions", json={"prompt": "ab", "max_tokens": 2},
        headers={"Authorization": f"Bearer {served.key}"}, timeout=60,
    )  # fmt: skip
    assert answer.status_code == 200, answer.text
    # It counts when the last byte is out, which may be after it came.
    until = time.monotonic() + 60
    while load(served.url, served.key) != Load(before.served + 1, is_busy=False):
        assert time.monotonic() < until
        time.sleep(0.01)
    with pytest.raises(ServerError, match="HTTP 401"):
        load(served.url, "another")


def run_keeper(folder: Path, settings: Settings, **environment: str) -> subprocess.Popen[str]:
    """As systemd starts it."""
    (folder / "tpu.env").write_text(settings_text(settings))
    command = [sys.executable, "-m", "rig.keeper", "--settings", str(folder / "tpu.env")]
    return subprocess.Popen(
        command, cwd=ROOT, stderr=subprocess.PIPE, text=True,
        env={**os.environ, "RIG_STATE": str(folder), **environment},
    )  # fmt: skip


def test_as_a_process_it_deletes_a_vm_whose_time_was_over_before_a_reboot(
    world: tuple[FakeTpu, Google], tmp_path: Path
) -> None:
    known = {"boot": "an-earlier-one", "before": 0, "uptime": 7200}
    (tmp_path / "keeper.json").write_text(json.dumps(known))
    settings = Settings(
        project_id="my-project", provisioning_model="spot", max_run_duration="2h", serve_port=9
    )
    tpu, _ = world
    with run_keeper(tmp_path, settings) as process:
        assert process.stderr
        line = process.stderr.readline()
        while "being deleted" not in line:
            assert line, "the keeper ended"
            line = process.stderr.readline()
        # It stays, to ask again should the deletion fail.
        until = time.monotonic() + 60
        while NAME in tpu.resources:
            assert process.poll() is None
            assert time.monotonic() < until
            time.sleep(0.01)
        process.terminate()
    assert line.startswith("ran ")
    assert tpu.attributes.get(NODE, {}).get("rig/keeper", line).startswith("ran ")


def test_as_a_process_with_nothing_to_keep_it_ends_at_once(
    world: tuple[FakeTpu, Google], tmp_path: Path
) -> None:
    tpu, _ = world
    with run_keeper(tmp_path, Settings(project_id="my-project")) as process:
        _, told = process.communicate(timeout=60)
    assert process.returncode == 0
    assert told == "nothing to keep: IDLE_MINUTES=0, and flex-start ends by itself\n"
    assert NAME in tpu.resources
