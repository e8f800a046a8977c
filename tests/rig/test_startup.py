"""startup.sh's stages against a VM's metadata server: each once, in order, told as they go, and loud when one fails.

What its functions do one by one is in startup.bats, which is run here too; a whole boot is in tests/boot.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from rig.bundle import settings_text
from rig.settings import ROOT, Settings
from rig.states import Boot
from tests.rig.fake_tpu import FakeTpu, metadata_door, rest_door

NODE = "projects/p/locations/us-west4-a/nodes/gemma4-rust-qr-node"
STAGES = ["python", "torch", "rust", "crate", "weights", "smoke", "unit", "serving"]


class Written(dict[str, str]):
    """Guest attributes, and every write of one."""

    def __init__(self) -> None:
        super().__init__()
        self.all: list[tuple[str, str]] = []

    def __setitem__(self, key: str, value: str) -> None:
        self.all.append((key.removeprefix("rig/"), value))
        super().__setitem__(key, value)


class Vm:
    """A machine that boots: its metadata, its disk, and stages that only write down that they ran."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.tpu, self.written = folder, FakeTpu(), Written()
        self.tpu.attributes[NODE] = self.written
        self.metadata = {
            "settings": settings_text(Settings(project_id="p")),
            "bundle-sha256": "one",
        }

    def boot(self, changed: str = "") -> subprocess.CompletedProcess[str]:
        """Runs the script with every stage replaced, and some of them once more by `changed`."""
        script = self.folder / "boot.sh"
        stages = "\n".join(
            f'stage_{name}() {{ echo {name} >> "$RIG_ROOT/did"; tell "{name} did it"; }}'
            for name in STAGES
        )
        script.write_text(f"source {ROOT}/rig/startup.sh\n{stages}\n{changed}\nmain\n")
        with metadata_door(self.tpu, NODE, self.metadata) as door:
            environment = {
                "PATH": os.environ["PATH"],
                "RIG_SOURCE_ONLY": "1",
                "RIG_ROOT": str(self.folder),
                "RIG_PAUSE": "0",
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
        return self.written.get(f"rig/{key}", "")

    @property
    def told(self) -> Boot:
        """What the rig makes of it."""
        return Boot(stage=self.attribute("stage"), progress=self.attribute("progress"))


@pytest.fixture
def vm(tmp_path: Path) -> Vm:
    return Vm(tmp_path)


def test_every_stage_runs_once_in_order_and_is_told_with_its_time(vm: Vm) -> None:
    done = vm.boot()
    assert done.returncode == 0, done.stdout
    assert vm.did == STAGES
    said = [line for name in STAGES for line in (f"STAGE: {name}", f"{name} did it")]
    assert done.stdout.splitlines() == [*said, "DONE"]
    assert (vm.folder / "var/log/torchtpu-rs-boot.log").read_text() == done.stdout
    assert vm.told.stage == "STAGE: serving"
    assert vm.told.is_done
    assert [name for name, _ in vm.told.done] == STAGES
    progress = vm.attribute("progress").splitlines()
    for name, line, told in zip(STAGES, progress[::2], progress[1::2], strict=False):
        time = r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ"
        assert re.fullmatch(rf"{name} \d+ s, began {time}", line), line
        assert told == f"  {name} did it"


def test_a_boot_writes_no_more_often_than_the_metadata_server_takes(vm: Vm) -> None:
    vm.boot()
    keys = [key for key, _ in vm.written.all]
    # Ten a minute: a stage's begin, and an end only where no other write is near.
    assert keys == ["stage"] * len(STAGES) + ["progress"]
    vm.written.all.clear()
    vm.boot()
    assert [key for key, _ in vm.written.all] == ["stage", "progress"]


def test_a_long_stage_is_told_when_it_ends(vm: Vm) -> None:
    vm.boot("stage_torch() { ((SECONDS += 60)); }")
    at = vm.written.all.index(("stage", "STAGE: rust"))
    key, text = vm.written.all[at - 1]
    assert key == "progress"
    assert "\ntorch 6" in text


def test_a_second_boot_only_serves_again_and_tells_the_first_ones_times(vm: Vm) -> None:
    vm.boot()
    first = vm.told.done
    done = vm.boot()
    assert done.returncode == 0
    assert vm.did == [*STAGES, "serving"]
    assert done.stdout.count("already done") == len(STAGES) - 1
    assert vm.told.done[:-1] == first[:-1]
    assert vm.told.is_done


def test_other_sources_or_settings_make_every_stage_run_again(vm: Vm) -> None:
    vm.boot()
    vm.metadata["bundle-sha256"] = "two"
    vm.boot()
    assert vm.did == STAGES * 2
    # What was there before was replaced: it is not done any more.
    vm.metadata["bundle-sha256"] = "one"
    vm.boot()
    assert vm.did == STAGES * 3
    vm.metadata["settings"] = settings_text(Settings(project_id="p", serve_context=4096))
    vm.boot()
    assert vm.did == STAGES * 4


def test_a_failure_names_its_stage_keeps_its_status_and_shows_the_end_of_the_log(vm: Vm) -> None:
    done = vm.boot("stage_crate() { echo no compiler; return 7; }")
    assert done.returncode == 7
    assert vm.did == ["python", "torch", "rust"]
    assert vm.attribute("stage") == "FAILED: crate"
    assert vm.told.failure is not None
    assert re.match(r"FAILED: stage crate, line \d+, status 7\n", vm.told.failure)
    assert "no compiler" in vm.told.failure
    assert [name for name, _ in vm.told.done] == ["python", "torch", "rust"]
    assert "DONE" not in vm.attribute("progress")
    # After whatever was wrong is put right, the boot goes on where it failed.
    assert vm.boot().returncode == 0
    assert vm.did == STAGES


def test_a_long_log_is_cut_to_what_an_attribute_holds(vm: Vm) -> None:
    noise = "for i in {1..40}; do printf 'line %s %0300d \\303\\244 \\033[31mred\\n' $i 0; done"
    vm.boot(f"stage_serving() {{ {noise}; echo the last words; return 1; }}")
    progress = vm.attribute("progress")
    assert len(progress.encode()) < 2048
    assert progress.isascii()
    assert progress.isprintable() or set(progress) - {"\n"} <= set(map(chr, range(32, 127)))
    assert progress.rstrip().endswith("the last words")
    assert [name for name, _ in vm.told.done] == STAGES[:-1]


@pytest.mark.parametrize(
    "fault", ['echo "$NO_SUCH_SETTING"', "false | true", "(exit 3)", 'x=$(false); echo "$x"']
)
def test_no_kind_of_failure_is_passed_over(vm: Vm, fault: str) -> None:
    assert vm.boot(f"stage_unit() {{ {fault}; echo went on; }}").returncode != 0
    assert vm.attribute("stage") == "FAILED: unit"
    assert "went on" not in vm.attribute("progress")


def test_a_boot_that_is_cut_off_says_so(vm: Vm) -> None:
    assert vm.boot("stage_weights() { kill -TERM $BASHPID; sleep 60; }").returncode != 0
    assert vm.attribute("stage") == "FAILED: weights"


def test_settings_arrive_as_variables_and_in_a_file(vm: Vm) -> None:
    show = (
        'stage_python() { echo "$SERVE_CONTEXT $TORCH_PIP_SPEC $CHECKPOINTS" > "$RIG_ROOT/seen"; }'
    )
    assert vm.boot(show).returncode == 0
    settings = Settings()
    seen = (vm.folder / "seen").read_text()
    assert seen == f"8192 {settings.torch_pip_spec} {' '.join(settings.checkpoints)}\n"
    assert (vm.folder / "etc/torchtpu-rs/tpu.env").read_text() == vm.metadata["settings"]


@pytest.mark.parametrize("spec", ["'jinja2>=3.1.6' torch", "torch==2.14.1 # this one"])
def test_a_setting_with_quotes_arrives_as_it_was_written(vm: Vm, spec: str) -> None:
    vm.metadata["settings"] = settings_text(Settings(project_id="p", torch_pip_spec=spec))
    assert vm.boot('stage_python() { echo "$TORCH_PIP_SPEC" > "$RIG_ROOT/seen"; }').returncode == 0
    assert (vm.folder / "seen").read_text() == f"{spec}\n"


def test_a_setting_is_never_run_as_a_command(vm: Vm) -> None:
    never = vm.folder / "never"
    vm.metadata["settings"] += f"SERVE_NOTE=$(touch {never}); touch {never}\n"
    assert vm.boot('stage_python() { echo "$SERVE_NOTE" > "$RIG_ROOT/seen"; }').returncode == 0
    assert (vm.folder / "seen").read_text() == f"$(touch {never}); touch {never}\n"
    assert not never.exists()


def test_without_settings_the_boot_fails_and_says_so(vm: Vm) -> None:
    del vm.metadata["settings"]
    assert vm.boot().returncode != 0
    assert vm.attribute("stage") == "FAILED: start"
    assert vm.did == []


def test_a_setting_that_is_missing_is_named(vm: Vm) -> None:
    lines = vm.metadata["settings"].splitlines(keepends=True)
    vm.metadata["settings"] = "".join(line for line in lines if not line.startswith("SERVE_SLOTS"))
    assert vm.boot().returncode != 0
    assert "expected the setting SERVE_SLOTS" in vm.attribute("progress")
    assert vm.did == []


def test_a_boot_goes_on_when_nobody_takes_its_attributes(vm: Vm) -> None:
    deaf = 'publish() { GCE_METADATA_HOST=127.0.0.1:9 command_publish "$@"; }'
    rename = 'eval "command_$(declare -f publish)"'
    assert vm.boot(f"{rename}\n{deaf}").returncode == 0
    assert vm.did == STAGES
    assert not vm.written


def test_the_scripts_functions() -> None:
    bats = shutil.which("bats", path=str(Path(sys.executable).parent))
    assert bats, "expected bats (make setup), found none"
    done = subprocess.run(
        [bats, str(Path(__file__).with_name("startup.bats"))],
        # Not whatever a version manager makes of python3.
        env=os.environ | {"PYTHON_HERE": sys.executable},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, f"{done.stdout}{done.stderr}"


def test_a_vm_whose_time_is_over_deletes_its_queued_resource_without_python(vm: Vm) -> None:
    settings = Settings(project_id="p", provisioning_model="spot")
    vm.metadata["settings"] = settings_text(settings)
    name = f"{settings.parent}/queuedResources/gemma4-rust-qr"
    vm.tpu.resources[name] = {"name": name, "state": {"state": "ACTIVE"}}
    (vm.folder / "bin").mkdir()
    for tool in ("curl", "sed", "mkdir", "mv"):
        (vm.folder / "bin" / tool).symlink_to(shutil.which(tool) or "")
    with metadata_door(vm.tpu, NODE, vm.metadata) as metadata, rest_door(vm.tpu) as google:
        done = subprocess.run(
            ["/bin/bash", "-c", '. "$1"; settings; end_vm', "end", str(ROOT / "rig/startup.sh")],
            env={
                "PATH": str(vm.folder / "bin"),
                "RIG_SOURCE_ONLY": "1",
                "RIG_ROOT": str(vm.folder),
                "GCE_METADATA_HOST": metadata.address,
                "TPU_API_ENDPOINT": f"http://{google.address}",
            },
            capture_output=True,
            text=True,
            timeout=30,
            check=False,
        )
    assert done.returncode == 0, done.stderr
    assert not vm.tpu.resources
