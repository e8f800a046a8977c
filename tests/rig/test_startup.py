"""startup.sh's stages against a VM's metadata server: each once, in order, told as they go, and loud when one fails."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from rig.bundle import settings_text
from rig.settings import ROOT, Settings
from tests.rig.fake_tpu import FakeTpu, metadata_door

if TYPE_CHECKING:
    from collections.abc import Iterator

NODE = "projects/p/locations/us-west4-a/nodes/gemma4-rust-qr-node"
STAGES = ["python", "torch", "rust", "crate", "weights", "smoke", "unit", "serving"]


class Vm:
    """A machine that boots: its metadata, its disk, and stages that only write down that they ran."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.tpu = folder, FakeTpu()
        self.metadata = {
            "settings": settings_text(Settings(project_id="p")),
            "bundle-sha256": "one",
        }

    def boot(self, changed: str = "") -> subprocess.CompletedProcess[str]:
        """Runs the script with every stage replaced, and some of them once more by `changed`."""
        script = self.folder / "boot.sh"
        stages = "\n".join(
            f'stage_{name}() {{ echo {name} >> "$RIG_ROOT/did"; }}' for name in STAGES
        )
        script.write_text(
            f"source {ROOT}/rig/startup.sh\n{stages}\n{changed}\n"
            'mkdir -p "$(dirname "$RIG_LOG")"; exec > >(tee -a "$RIG_LOG") 2>&1\nmain\n'
        )
        with metadata_door(self.tpu, NODE, self.metadata) as door:
            environment = {
                "PATH": os.environ["PATH"],
                "RIG_SOURCE_ONLY": "1",
                "RIG_ROOT": str(self.folder),
                "GCE_METADATA_HOST": door.address,
            }
            return subprocess.run(
                ["bash", str(script)],
                env=environment,
                capture_output=True,
                text=True,
                timeout=60,
                check=False,
            )

    @property
    def did(self) -> list[str]:
        file = self.folder / "did"
        return file.read_text().split() if file.exists() else []

    def attribute(self, key: str) -> str:
        return self.tpu.attributes.get(NODE, {}).get(f"rig/{key}", "")


@pytest.fixture
def vm(tmp_path: Path) -> Iterator[Vm]:
    return Vm(tmp_path)


def test_every_stage_runs_once_in_order_and_is_told(vm: Vm) -> None:
    done = vm.boot()
    assert done.returncode == 0, done.stdout
    assert vm.did == STAGES
    assert [line for line in done.stdout.splitlines() if line.startswith("STAGE")] == [
        f"STAGE: {name}" for name in STAGES
    ]
    assert vm.attribute("stage") == "STAGE: serving"
    progress = vm.attribute("progress").splitlines()
    assert [line.split()[0] for line in progress] == [*STAGES, "DONE"]


def test_a_second_boot_only_serves_again(vm: Vm) -> None:
    vm.boot()
    assert vm.boot().returncode == 0
    assert vm.did == [*STAGES, "serving"]


def test_other_sources_or_settings_make_every_stage_run_again(vm: Vm) -> None:
    vm.boot()
    vm.metadata["bundle-sha256"] = "two"
    vm.boot()
    assert vm.did == STAGES * 2
    vm.metadata["settings"] = settings_text(Settings(project_id="p", serve_context=4096))
    vm.boot()
    assert vm.did == STAGES * 3


def test_a_failure_names_its_stage_keeps_its_status_and_shows_the_end_of_the_log(vm: Vm) -> None:
    done = vm.boot("stage_crate() { echo no compiler; return 7; }")
    assert done.returncode == 7
    assert vm.did == ["python", "torch", "rust"]
    assert vm.attribute("stage") == "FAILED: crate"
    assert "FAILED: stage crate, line " in vm.attribute("progress")
    assert "no compiler" in vm.attribute("progress")
    assert "DONE" not in vm.attribute("progress")
    assert len(vm.attribute("progress").encode()) < 2048
    # After whatever was wrong is put right, the boot goes on where it failed.
    assert vm.boot().returncode == 0
    assert vm.did == STAGES


def test_settings_arrive_as_variables_and_in_a_file(vm: Vm) -> None:
    show = (
        'stage_python() { echo "$SERVE_CONTEXT $TORCH_PIP_SPEC $CHECKPOINTS" > "$RIG_ROOT/seen"; }'
    )
    assert vm.boot(show).returncode == 0
    settings = Settings()
    seen = (vm.folder / "seen").read_text()
    assert seen == f"8192 {settings.torch_pip_spec} {' '.join(settings.checkpoints)}\n"
    assert (vm.folder / "etc/torchtpu-rs/tpu.env").read_text() == vm.metadata["settings"]


def test_a_setting_is_never_run_as_a_command(vm: Vm) -> None:
    vm.metadata["settings"] += "SERVE_NOTE=$(touch /tmp/never); touch /tmp/never\n"
    assert vm.boot('stage_python() { echo "$SERVE_NOTE" > "$RIG_ROOT/seen"; }').returncode == 0
    assert (vm.folder / "seen").read_text() == "$(touch /tmp/never); touch /tmp/never\n"
    assert not Path("/tmp/never").exists()


def test_without_settings_the_boot_fails_and_says_so(vm: Vm) -> None:
    del vm.metadata["settings"]
    assert vm.boot().returncode != 0
    assert vm.attribute("stage") == "FAILED: start"
    assert vm.did == []
