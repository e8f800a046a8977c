"""From asking for a VM to a chat with it: what Google is sent is what boots, under a real systemd, until the server that it built answers.

The crate is built from the unpacked bundle and nothing else. Stands in for what cannot be had here: apt, rustup's download
and the wheels, which are this tree's. A first run compiles for a minute; later ones find rust/target/boot.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import pytest

from models import EMBEDDED
from rig.api import TpuApi
from rig.bundle import bundle, metadata
from rig.google import Google
from rig.provision import Rig
from rig.records import Record
from rig.settings import ROOT, Settings
from rig.states import STAGES, Boot
from tests.rig import machine as machines
from tests.rig.fake_hub import Asked, hub_door
from tests.rig.fake_tpu import FakeTpu, metadata_door, rest_door, services
from tests.rig.machine import PACKAGES, PYTHON, TOOLS, Machine

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rig.provision import Status
    from rig.states import QueuedResource

NODE = "projects/p/locations/us-west4-a/nodes/gemma4-rust-qr-node"
KEY = "key-of-this-test-0123456789"
HOME = "/opt/torchtpu-rs"
BOOT_UNIT = "google-startup-scripts.service"
COLD_SECONDS = 500
KEPT = ROOT / "rust/target/boot"
SETTINGS = Settings(
    project_id="p",
    provisioning_model="spot",
    checkpoints=("acme/tiny",),
    revisions=("main",),
    serve_context=4096,
    python_bin=f"python{sys.version_info.major}.{sys.version_info.minor}",
)

APT = """#!/bin/sh
echo "$0 $*" >>/run/apt
"""
# A virtual environment that has this tree's packages, without what `make build` put there.
PYTHON_WITH_WHEELS = f"""#!/bin/bash
set -e
{PYTHON} "$@"
[[ $1 == -m && $2 == venv ]] || exit 0
environment="${{@: -1}}"
cd "$environment"/lib/python*/site-packages
rm -rf setuptools* pkg_resources _distutils_hack distutils-precedence.pth
for package in {PACKAGES}/*; do
  case ${{package##*/}} in
  torchtpu_rs* | pip | pip-*) ;;
  *.dist-info) cp -r "$package" . ;;
  *) ln -s "$package" . ;;
  esac
done
cp {TOOLS}/uv {TOOLS}/maturin "$environment/bin"
printf '#!%s/bin/python\\nfrom huggingface_hub.cli.hf import main\\nmain()\\n' "$environment" >"$environment/bin/hf"
chmod +x "$environment/bin/hf"
"""
# As the image's, which runs the script without a home.
STARTUP = """[Service]
Type=oneshot
KillMode=process
ExecStart=/bin/sh -c 'curl -fsS -H "Metadata-Flavor: Google" \
  "http://$GCE_METADATA_HOST/computeMetadata/v1/instance/attributes/startup-script" >/run/startup-script && exec /bin/bash /run/startup-script'
"""


class Vm:
    """A fresh VM with its metadata, and what is seen of it from outside."""

    def __init__(self, machine: Machine) -> None:
        self.machine, self.tpu, self.asked = machine, FakeTpu(), Asked()
        self.packed = bundle()
        self.metadata: dict[str, str] = {}

    def ask_for_it(self, rig: Rig) -> None:
        """As `torchtpu-rig create` does; its metadata are what the service was sent."""
        assert rig.create() is not None
        self.tpu.tick(to="ACTIVE")
        self.metadata.update(self.tpu.nodes[NODE]["metadata"])

    def install(self, metadata_host: str, hub: str) -> None:
        """What an image has, and what stands in for downloads."""
        machine = self.machine
        for name in ("apt-get", "add-apt-repository"):
            machine.write(f"/usr/local/bin/{name}", APT, 0o755)
        machine.write(f"/usr/local/bin/{SETTINGS.python_bin}", PYTHON_WITH_WHEELS, 0o755)
        machine.write(f"/etc/systemd/system/{BOOT_UNIT}", STARTUP)
        for tool in ("cargo", "rustup"):
            here = os.environ.get(f"{tool.upper()}_HOME") or f"{Path.home()}/.{tool}"
            machine.run("ln", "-s", here, f"{HOME}/{tool}")
        machine.run("systemctl", "daemon-reload")
        machine.run(
            "systemctl", "set-environment", f"GCE_METADATA_HOST={metadata_host}", f"HF_ENDPOINT=http://{hub}",
            "SERVE_DEVICE=cpu", "UV_OFFLINE=1", "CARGO_NET_OFFLINE=true", "RIG_HEALTH_SECONDS=90",
        )  # fmt: skip

    def boot(self) -> Boot:
        """Runs the script as the image does at every start; what it published."""
        # It returns when the script has ended, well or not.
        self.machine.try_run("systemctl", "start", BOOT_UNIT, patience=COLD_SECONDS)
        found = self.tpu.attributes[NODE]
        return Boot(stage=found["rig/stage"], progress=found["rig/progress"])

    @property
    def log(self) -> str:
        return self.machine.path("/var/log/torchtpu-rs-boot.log").read_text()

    def ask(self, path: str, body: object = None) -> Any:
        """What the server says to whoever has the key."""
        status, text = self.machine.ask(path, body, KEY)
        assert status == 200, text
        return json.loads(text)


class Token:
    """Whoever asks may."""

    def token(self, *, fresh: bool = False) -> str:
        return "a-token"


@contextlib.contextmanager
def asking(vm: Vm, records: Path) -> Iterator[Rig]:
    """The rig on the laptop of whoever asks for the VM, while the service is there."""
    with (
        rest_door(vm.tpu) as door,
        patch.dict(os.environ, services(door)),
        Google(Token()) as google,
    ):
        yield Rig(
            SETTINGS,
            TpuApi(google),
            Record(SETTINGS, records),
            prepare=lambda: KEY,
            pack=lambda: vm.packed,
        )


def lacking() -> str | None:
    """Why no VM can be booted here."""
    reason = machines.lacking()
    return reason or (None if shutil.which("rustup") else "needs Rust installed by rustup")


@contextlib.contextmanager
def asked_for(folder: Path) -> Iterator[tuple[Vm, Rig]]:
    """A VM that was asked for and has not booted yet, and the rig that asked."""
    KEPT.mkdir(parents=True, exist_ok=True)
    with ExitStack() as stack:
        machine = stack.enter_context(Machine(folder / "machine", {KEPT: f"{HOME}/target"}))
        vm = Vm(machine)
        rig = stack.enter_context(asking(vm, folder / "records"))
        vm.ask_for_it(rig)
        hub = {"acme/tiny": EMBEDDED}
        doors = [
            machine.in_network(lambda: metadata_door(vm.tpu, NODE, vm.metadata)),
            machine.in_network(lambda: hub_door(hub, vm.asked, cut_first=".safetensors")),
        ]
        vm.install(*(stack.enter_context(door).address for door in doors))
        yield vm, rig


@pytest.fixture(scope="module")
def vm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Vm]:
    if reason := lacking():
        pytest.skip(f"a machine to boot {reason}")
    with asked_for(tmp_path_factory.mktemp("vm")) as (found, _):
        yield found


def vm_resource(now: Status) -> QueuedResource:
    assert now.resource is not None
    return now.resource


@pytest.fixture(scope="module")
def booted(vm: Vm) -> Boot:
    """Its first boot, which went well."""
    found = vm.boot()
    assert found.is_done, vm.log
    return found


def test_a_boot_ends_with_every_stage_done_and_tells_what_the_published_one_told(
    vm: Vm, booted: Boot
) -> None:
    assert [name for name, _ in booted.done] == list(STAGES)
    lines = iter(vm.log.splitlines())
    for begin in (
        "STAGE: python",
        "g++ (",
        "STAGE: torch",
        "torch 2.",
        "STAGE: rust",
        "STAGE: crate",
        "rustc 1.",
        "    Finished `release` profile [optimized] target(s) in ",
        "STAGE: weights",
        "STAGE: smoke",
        "torchtpu_rs 0.1.0 matmul_sum 512.0 on cpu",
        "CPU smoke OK",
        "STAGE: unit",
        "STAGE: serving",
        "DONE",
    ):
        assert any(line.startswith(begin) for line in lines), f"{begin} missing in\n{vm.log}"
    assert "  CPU smoke OK\n" in booted.progress


def test_whoever_asked_for_it_sees_it_serve_until_it_is_deleted(
    vm: Vm, booted: Boot, tmp_path: Path
) -> None:
    with asking(vm, tmp_path) as rig:
        now = rig.status()
        assert now.phase == "serving"
        # The keeper goes on telling, so only what the boot said is the same.
        assert now.boot is not None
        assert (now.boot.stage, now.boot.progress) == (booted.stage, booted.progress)
        assert rig.differences(rig.adopt(vm_resource(now))) == []
        assert rig.delete()
        assert rig.status().phase == "absent"
        # What follows looks at the VM, which deleting does not end here.
        vm.ask_for_it(rig)


def test_the_server_that_was_built_there_answers_with_the_key_of_the_metadata(
    vm: Vm, booted: Boot
) -> None:
    body = {"messages": [{"role": "user", "content": "Say hi."}]}
    answer = vm.ask("/v1/chat/completions", body)
    assert answer["model"] == "acme/tiny"
    assert answer["choices"][0]["finish_reason"] == "stop"
    assert vm.machine.ask("/v1/chat/completions", body)[0] == 401
    where = "import rig, server, torchtpu_rs, tpu; print(*(m.__file__ for m in (rig, server, torchtpu_rs, tpu)))"
    for file in vm.machine.run(f"{HOME}/venv/bin/python", "-c", where).split():
        assert file.startswith(f"{HOME}/venv/lib/")


def test_the_service_and_the_keeper_run_as_users_of_their_own(vm: Vm, booted: Boot) -> None:
    users = {}
    for unit in ("torchtpu-rs.service", "torchtpu-rs-keeper.service"):
        assert vm.machine.show(unit, "ActiveState") == "active", vm.machine.journal(unit)
        assert vm.machine.show(unit, "NRestarts") == "0"
        pid = vm.machine.show(unit, "MainPID")
        users[unit] = vm.machine.run("stat", "--format=%U", f"/proc/{pid}")
    assert users["torchtpu-rs.service"] == "torchtpu"
    assert users["torchtpu-rs-keeper.service"] not in {"root", "torchtpu"}
    # It has begun to count, where a reboot does not forget it.
    vm.machine.run("test", "-s", "/var/lib/private/torchtpu-rs-keeper/keeper.json")


@pytest.mark.parametrize("user", ["torchtpu", "root"])
def test_the_smoke_test_is_as_confined_as_the_service_whoever_runs_it(
    vm: Vm, booted: Boot, user: str
) -> None:
    vm.machine.write("/run/try", "RIG_SOURCE_ONLY=1 source /run/startup-script\nconfined $*\n")
    run = ("bash", "/run/try", user)
    assert vm.machine.run(*run, "id", "-un") == user
    assert vm.machine.run(*run, "id", "-gn") == user
    vm.machine.run(*run, "touch", "/var/cache/torchtpu-rs/new")
    for place in ("/etc/new", "/opt/torchtpu-rs/new", "/root/new"):
        refused = vm.machine.try_run(*run, "touch", place)
        assert refused.returncode == 1, place
        assert "touch: " in refused.stderr
    vm.machine.run("rm", "/var/cache/torchtpu-rs/new")


def test_the_key_is_in_no_log_attribute_or_file_that_others_read(vm: Vm, booted: Boot) -> None:
    assert KEY not in vm.log
    assert KEY not in str(vm.tpu.attributes)
    assert KEY not in vm.machine.run("journalctl", "--no-pager")
    with_key = vm.machine.try_run("grep", "-rlF", KEY, "/etc", "/var", HOME).stdout.split()
    assert with_key == ["/etc/torchtpu-rs/api-key"]
    assert vm.machine.run("stat", "--format=%a %U", *with_key) == "600 root"


def test_a_download_that_broke_off_was_tried_again(vm: Vm, booted: Boot) -> None:
    assert vm.asked.cut == ["model.safetensors"]
    assert vm.asked.files.count("model.safetensors") == 2


def test_a_second_boot_skips_everything_but_serving(vm: Vm, booted: Boot) -> None:
    before = len(vm.asked.files)
    vm.machine.run("systemctl", "stop", "torchtpu-rs.service")
    again = vm.boot()
    assert again.is_done, vm.log
    assert again.done[:-1] == booted.done[:-1]
    assert vm.log.count("already done") == len(STAGES) - 1
    assert len(vm.asked.files) == before
    assert vm.ask("/v1/models")["data"][0]["id"] == "acme/tiny"


def test_other_settings_are_installed_over_a_vm_that_serves(vm: Vm, booted: Boot) -> None:
    changed = SETTINGS.model_copy(update={"serve_context": 2048})
    vm.metadata.update(metadata(changed, KEY, vm.packed))
    assert vm.boot().is_done, vm.log
    assert vm.ask("/v1/engine")["layout"]["context"] == 2048


def test_sources_that_were_changed_on_the_way_are_not_built(vm: Vm, booted: Boot) -> None:
    vm.metadata["bundle-sha256"] = "0" * 64
    ended = vm.boot()
    assert ended.stage == "FAILED: crate"
    assert ended.failure is not None
    assert f"expected sources with the hash {'0' * 64}, found " in ended.failure
