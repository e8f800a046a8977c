"""`torchtpu-rig` as an operator runs it, against the fake of Google's services."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from dataclasses import dataclass, field
from typing import TYPE_CHECKING
from unittest.mock import patch

import pytest
from typer.testing import CliRunner

from rig.cli import app
from rig.settings import ROOT
from tests.rig.fake_tpu import Door, FakeTpu, rest_door, services

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from click.testing import Result

ZONE = "projects/my-project/locations/us-west4-a"
NAME = f"{ZONE}/queuedResources/gemma4-rust-qr"
NODE = f"{ZONE}/nodes/gemma4-rust-qr-node"
FIREWALL = "projects/my-project/global/firewalls/gemma4-rust-8000"
PROGRESS = "python 40 s\ntorch 20 s\nrust 9 s\ncrate 60 s\nweights 30 s\nsmoke 5 s\nunit 1 s\n"


@dataclass
class Desk:
    """A machine whose user is signed in, and the service."""

    tpu: FakeTpu
    environment: dict[str, str]
    folder: Path
    told: list[str] = field(default_factory=list)
    """All that any command has printed."""

    def run(self, *arguments: str, typed: str = "") -> Result:
        """A command, in this process."""
        with patch.dict(os.environ, self.environment, clear=True):
            done = CliRunner().invoke(app, arguments, input=typed, catch_exceptions=False)
        self.told += [done.stdout, done.stderr]
        return done

    def serve(self) -> None:
        """The VM has booted."""
        self.tpu.tick(to="ACTIVE")
        self.tpu.publish(NODE, stage="STAGE: serving", progress=f"{PROGRESS}serving 30 s\nDONE")

    def after_each(self, steps: list[Callable[[], None]], question: str) -> threading.Thread:
        """Does one of `steps` whenever the service was asked `question` again."""

        def go_on() -> None:
            seen = 0
            for step in steps:
                while self.asked(question) <= seen and not self.over.wait(0.01):
                    pass
                seen = self.asked(question)
                step()

        thread = threading.Thread(target=go_on, daemon=True)
        thread.start()
        return thread

    over: threading.Event = field(default_factory=threading.Event)

    def asked(self, question: str) -> int:
        return [f"{call.method} {call.path}" for call in self.tpu.calls].count(question)


@pytest.fixture
def desk(tmp_path: Path) -> Iterator[Desk]:
    tpu = FakeTpu()
    with rest_door(tpu) as door:
        found = Desk(tpu, environment(door, tmp_path), tmp_path)
        yield found
        found.over.set()
    keys = [file.read_text() for file in tmp_path.rglob("api-key")]
    assert not [text for text in found.told for key in keys if key in text]


def environment(door: Door, folder: Path) -> dict[str, str]:
    return {
        "PATH": os.environ["PATH"],
        "HOME": str(folder),
        "XDG_STATE_HOME": str(folder / "state"),
        "GOOGLE_OAUTH_ACCESS_TOKEN": "a-token",
        "PROJECT_ID": "my-project",
        **services(door),
    }


def test_a_plan_shows_cost_and_the_gcloud_command_and_asks_nobody(desk: Desk) -> None:
    done = desk.run("plan")
    assert done.exit_code == 0, done.stderr
    assert "at most USD 2.40: 4 h at USD 0.60" in done.stdout
    assert "gcloud alpha compute tpus queued-resources create gemma4-rust-qr" in done.stdout
    request = json.loads(desk.run("plan", "--json").stdout)
    assert request["provisioningModel"] == "FLEX_START"
    assert request["tpu"]["nodeSpec"][0]["node"]["metadata"]["bundle-crate"].endswith(" bytes)")
    assert desk.tpu.calls == []


def test_what_is_rendered_is_the_whole_metadata_and_only_the_user_can_read_it(desk: Desk) -> None:
    assert desk.run("render", str(desk.folder / "rendered")).exit_code == 0
    files = {file.name: file for file in (desk.folder / "rendered").iterdir()}
    assert set(files) == {
        "enable-guest-attributes",
        "startup-script",
        "settings",
        "bundle-crate",
        "bundle-server",
        "bundle-sha256",
        "api-key",
    }
    assert all(file.stat().st_mode & 0o777 == 0o600 for file in files.values())


def test_creating_shows_the_cost_asks_and_follows_the_boot_until_it_serves(desk: Desk) -> None:
    publish = desk.tpu.publish
    steps: list[Callable[[], None]] = [
        desk.tpu.tick,
        desk.tpu.tick,
        desk.tpu.tick,
        lambda: publish(NODE, stage="STAGE: python"),
        lambda: publish(NODE, stage="STAGE: crate", progress="python 40 s\ntorch 1 s\nrust 2 s\n"),
        desk.serve,
    ]
    desk.after_each(steps, f"GET /v2alpha1/{NAME}")
    done = desk.run("create", "--poll-seconds", "0.2", typed="y\n")
    assert done.exit_code == 0, done.stderr
    assert "at most USD 2.40: 4 h at USD 0.60" in done.stderr
    assert "🚀 Queued Resource gemma4-rust-qr creation initiated in us-west4-a" in done.stderr
    lines = done.stdout.splitlines()
    assert lines[-1] == "serving at 127.0.0.1"
    stages = [line for line in lines if line.startswith("STAGE")]
    assert stages == [
        f"STAGE: {name}"
        for name in ("python", "torch", "rust", "crate", "weights", "smoke", "unit", "serving")
    ]
    assert lines.index("ACTIVE") < lines.index("STAGE: python")
    assert desk.tpu.project.firewalls[FIREWALL]["sourceRanges"] == ["203.0.113.7/32"]


@pytest.mark.parametrize("typed", ["n\n", ""])
def test_without_a_yes_nothing_is_created(desk: Desk, typed: str) -> None:
    assert desk.run("create", typed=typed).exit_code == 1
    assert not desk.tpu.resources
    assert not desk.tpu.project.firewalls


def test_nothing_is_created_above_the_cap(desk: Desk) -> None:
    desk.environment["MAX_COST_USD"] = "1"
    done = desk.run("create", "--yes")
    assert done.exit_code == 1
    assert "expected a run of at most USD 1.00 (MAX_COST_USD)" in done.stderr
    assert not desk.tpu.resources


def test_creating_again_adopts_and_says_what_would_be_otherwise(desk: Desk) -> None:
    assert desk.run("create", "--yes", "--no-wait").exit_code == 0
    desk.environment["SERVE_CONTEXT"] = "4096"
    done = desk.run("create", "--no-wait")
    assert done.exit_code == 0
    assert "is there already" in done.stderr
    assert "SERVE_CONTEXT is 8192, and would be 4096" in done.stderr
    assert len(desk.tpu.resources) == 1


def test_status_tells_phase_address_and_time_left_for_people_and_for_scripts(desk: Desk) -> None:
    absent = json.loads(desk.run("status", "--json").stdout)
    assert (absent["phase"], absent["address"]) == ("absent", None)
    desk.run("create", "--yes", "--no-wait")
    desk.serve()
    desk.tpu.publish(NODE, keeper="idle 25 of 30 min: deleted at 12:30 UTC unless asked")
    desk.tpu.nodes[NODE]["schedulingConfig"]["terminationTimestamp"] = "2099-12-01T08:00:00Z"
    found = json.loads(desk.run("status", "--json").stdout)
    assert (found["phase"], found["address"], found["stage"]) == (
        "serving",
        "127.0.0.1",
        "STAGE: serving",
    )
    assert found["stages"]["crate"] == "60 s"
    assert found["seconds_left"] > 0
    shown = desk.run("status").stdout
    assert "(08:00 UTC)" in shown
    assert "USD 0.60 an hour" in shown
    assert "idle 25 of 30 min" in shown


def test_what_holds_quota_is_told_with_the_command_that_frees_it(desk: Desk) -> None:
    desk.run("create", "--yes", "--no-wait")
    desk.tpu.tick(to="FAILED")
    shown = desk.run("status").stdout
    assert "no more capacity in the zone" in shown
    (command,) = [line for line in shown.splitlines() if "holds quota" in line]
    arguments = command.split("torchtpu-rig ")[1].split()
    assert desk.run(*arguments, "--yes").exit_code == 0
    assert not desk.tpu.resources


def test_watching_ends_with_a_status_that_scripts_can_read(desk: Desk) -> None:
    desk.run("create", "--yes", "--no-wait")
    assert desk.run("watch", "--timeout", "0").exit_code == 3
    desk.tpu.tick(to="ACTIVE")
    desk.tpu.publish(NODE, stage="FAILED: crate", progress="FAILED: stage crate\nno compiler")
    failed = desk.run("watch")
    assert failed.exit_code == 1
    assert "no compiler" in failed.stdout
    assert "torchtpu-rig ssh" in failed.stderr
    desk.tpu.tick(to="SUSPENDED")
    ended = desk.run("watch")
    assert ended.exit_code == 1
    assert "torchtpu-rig delete" in ended.stderr


def test_stopping_to_watch_says_that_the_vm_goes_on(desk: Desk) -> None:
    desk.run("create", "--yes", "--no-wait")
    with subprocess.Popen(
        [sys.executable, "-m", "rig", "watch"],
        env=desk.environment,
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        # As a terminal has it: whoever runs the tests in the background ignores SIGINT, and children inherit that.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    ) as watching:
        assert watching.stdout is not None
        assert watching.stdout.readline() == "CREATING\n"
        watching.send_signal(signal.SIGINT)
        _, told = watching.communicate(timeout=20)
    assert watching.returncode == 130
    assert "the VM goes on and costs" in told
    assert len(desk.tpu.resources) == 1


def test_logs_are_what_the_vm_published_without_ssh(desk: Desk) -> None:
    desk.run("create", "--yes", "--no-wait")
    assert desk.run("logs").exit_code == 3
    desk.tpu.tick(to="ACTIVE")
    desk.tpu.publish(
        NODE, stage="FAILED: torch", progress="python 40 s\nFAILED: stage torch\nno space"
    )
    assert desk.run("logs").stdout.splitlines() == [
        "python 40 s",
        "FAILED: stage torch",
        "no space",
        "FAILED: torch",
    ]


def test_the_address_is_data_and_the_keys_file_is_named_and_the_key_is_not(desk: Desk) -> None:
    desk.run("create", "--yes", "--no-wait")
    assert desk.run("address").exit_code == 1
    desk.serve()
    done = desk.run("address")
    assert done.stdout == "http://127.0.0.1:8000/v1\n"
    (file,) = desk.folder.rglob("api-key")
    assert str(file) in done.stderr


def test_a_key_in_secret_manager_is_made_once_and_does_not_travel(desk: Desk) -> None:
    desk.environment["API_KEY_SECRET"] = "rig-key"
    assert desk.run("create", "--yes", "--no-wait").exit_code == 0
    ((key,),) = desk.tpu.project.secrets.values()
    node = desk.tpu.resources[NAME]["tpu"]["nodeSpec"][0]["node"]
    assert "api-key" not in node["metadata"]
    assert key not in json.dumps(node)
    desk.serve()
    told = desk.run("address").stderr
    assert "Secret Manager, rig-key" in told
    assert not list(desk.folder.rglob("api-key"))
    assert not [text for text in desk.told if key in text]
    # Another rig of the project has the same key.
    desk.run("create", "--yes", "--no-wait", "--name", "another")
    assert list(desk.tpu.project.secrets.values()) == [[key]]


def test_deleting_asks_for_the_name_and_takes_the_way_in_with_the_last_vm(desk: Desk) -> None:
    desk.run("create", "--yes", "--no-wait")
    desk.run("create", "--yes", "--no-wait", "--name", "another")
    assert desk.run("delete", typed="yes\n").exit_code == 1
    assert len(desk.tpu.resources) == 2
    assert desk.run("delete", typed="gemma4-rust-qr\n").exit_code == 0
    assert FIREWALL in desk.tpu.project.firewalls
    assert desk.run("delete", "--yes", "--name", "another").exit_code == 0
    assert not desk.tpu.resources
    assert not desk.tpu.project.firewalls
    assert "there was no another" in desk.run("delete", "--yes", "--name", "another").stderr


def test_wrong_settings_are_named_and_end_with_their_own_status(desk: Desk) -> None:
    desk.environment["SERVE_SLOTS"] = "many"
    done = desk.run("status")
    assert done.exit_code == 78
    assert "SERVE_SLOTS" in done.stderr
    del desk.environment["SERVE_SLOTS"], desk.environment["PROJECT_ID"]
    done = desk.run("create", "--yes")
    assert done.exit_code == 78
    assert "--project" in done.stderr
    assert desk.run("status", "--project", "my-project").exit_code == 0


def test_who_is_not_signed_in_is_told_how_to(desk: Desk) -> None:
    del desk.environment["GOOGLE_OAUTH_ACCESS_TOKEN"]
    desk.environment |= {
        "PATH": "/usr/bin/nothing",
        "NO_GCE_CHECK": "true",
    }
    done = desk.run("status")
    assert done.exit_code == 1
    assert "gcloud auth application-default login" in done.stderr


def test_cost_capacity_and_doctor_answer_before_anything_exists(desk: Desk) -> None:
    assert "USD 0.60" in desk.run("cost").stdout
    offered = desk.run("capacity").stdout
    assert "us-west4-a" in offered
    assert "flex-start" in offered
    looked = desk.run("doctor")
    assert looked.exit_code == 0, looked.stdout
    desk.tpu.project.enabled.discard("tpu.googleapis.com")
    looked = desk.run("doctor")
    assert looked.exit_code == 1
    assert "gcloud services enable tpu.googleapis.com" in looked.stdout
    assert not desk.tpu.resources


def test_ways_onto_the_vm_are_gclouds_and_a_tunnel_opens_no_port(desk: Desk) -> None:
    assert desk.run("ssh", "--dry-run", "--", "--command", "uptime").stdout == (
        "gcloud alpha compute tpus tpu-vm ssh gemma4-rust-qr-node --project=my-project --zone=us-west4-a --command uptime\n"
    )
    assert desk.run("tunnel", "--dry-run").stdout == (
        "gcloud alpha compute tpus tpu-vm ssh gemma4-rust-qr-node --project=my-project --zone=us-west4-a "
        "--tunnel-through-iap -- -N -o ExitOnForwardFailure=yes -L 127.0.0.1:18000:127.0.0.1:8000\n"
    )


def test_a_fleet_is_created_within_one_cap_and_deleted_together(desk: Desk) -> None:
    assert desk.run("fleet", "create", "--replicas", "3", "--yes").exit_code == 1
    assert not desk.tpu.resources
    made = desk.run("fleet", "create", "--replicas", "2", typed="y\n")
    assert made.exit_code == 0, made.stderr
    assert "together at most USD 4.80" in made.stderr
    assert {name.rsplit("/", 1)[1] for name in desk.tpu.resources} == {
        "gemma4-rust-qr-0",
        "gemma4-rust-qr-1",
    }
    assert desk.run("fleet", "status", "--replicas", "2").stdout.count("waiting") == 2
    assert desk.run("fleet", "delete", "--replicas", "2", typed="gemma4-rust-qr\n").exit_code == 0
    assert not desk.tpu.resources


def test_a_fleet_is_not_served_to_others_without_a_key(desk: Desk) -> None:
    done = desk.run("fleet", "serve", "--worker", "http://127.0.0.1:9", "--host", "0.0.0.0")
    assert done.exit_code == 1
    assert "expected --api-key-file with --host 0.0.0.0" in done.stderr
