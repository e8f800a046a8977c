"""project-setup.sh: what it changes, what it asks before, and what it says when something is missing.

gcloud and claude are stand-ins that write down how they were called: the real ones would need a project and an account.
"""

from __future__ import annotations

import os
import re
import shutil
import stat
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from rig.settings import ROOT, read

if TYPE_CHECKING:
    from pathlib import Path

SCRIPT = ROOT / "project-setup.sh"
APIS = [
    "tpu.googleapis.com",
    "compute.googleapis.com",
    "secretmanager.googleapis.com",
    "cloudbilling.googleapis.com",
]
GCLOUD = """\
#!/bin/bash
echo "gcloud $*" >>"$RECORD"
case "$1 $2" in
  "auth list") echo "$ACCOUNT" ;;
  "services list") [[ -z $REFUSED ]] || { echo "$REFUSED" >&2; exit 1; }; cat "$ENABLED" ;;
  "services enable") for word in "${@:3}"; do [[ $word == -* ]] || echo "$word" >>"$ENABLED"; done ;;
  *) exit 9 ;;
esac
"""
CLAUDE = """\
#!/bin/bash
echo "claude $*" >>"$RECORD"
case "$2 $3" in
  "list --json") echo "[$(cat "$PLUGINS")]" ;;
  "marketplace add") [[ -d $4/.claude-plugin ]] ;;
  "install gemma4-rust-rig@torchtpu-rs") echo '{"id": "gemma4-rust-rig@torchtpu-rs"}' >>"$PLUGINS" ;;
  *) exit 9 ;;
esac
"""
# Everything the script runs besides; a PATH of its own, so that a tool can be missing.
TOOLS = (
    *("bash", "env", "dirname", "awk", "cmp", "mktemp", "chmod", "stat", "mv", "rm", "cat"),
    *("grep", "du", "tail", "cut"),
)


class Laptop:
    """A machine with a folder of the user's."""

    def __init__(self, place: Path) -> None:
        self.place, self.folder, self.bin = place, place / "mine", place / "bin"
        self.folder.mkdir()
        self.bin.mkdir()
        for name in TOOLS:
            found = shutil.which(name)
            assert found is not None, f"expected {name}, found none"
            (self.bin / name).symlink_to(found)
        # A script, since a link would lose the environment that it belongs to.
        self.install("python3", f'#!/bin/bash\nexec {sys.executable} "$@"\n')
        self.install("gcloud", GCLOUD)
        self.install("claude", CLAUDE)
        self.record, self.enabled, self.plugins = (
            place / "record",
            place / "enabled",
            place / "plugins",
        )
        for file in (self.record, self.enabled, self.plugins):
            file.touch()
        self.account, self.refused = "me@example.com", ""

    def install(self, name: str, text: str) -> None:
        file = self.bin / name
        file.write_text(text)
        file.chmod(0o755)

    def setup(
        self, *arguments: str, says: str = "", script: Path = SCRIPT
    ) -> subprocess.CompletedProcess[str]:
        environment = {
            "PATH": str(self.bin),
            "RECORD": str(self.record),
            "ENABLED": str(self.enabled),
            "PLUGINS": str(self.plugins),
            "ACCOUNT": self.account,
            "REFUSED": self.refused,
        }
        return subprocess.run(
            [str(script), str(self.folder), *arguments],
            env=environment, input=says, capture_output=True, text=True, timeout=60, check=False,
        )  # fmt: skip

    @property
    def changes(self) -> list[str]:
        """Commands that change something, in order."""
        looks = ("gcloud auth list", "gcloud services list", "claude plugin list")
        return [line for line in self.record.read_text().splitlines() if not line.startswith(looks)]

    @property
    def file(self) -> Path:
        return self.folder / "tpu.env"


@pytest.fixture
def laptop(tmp_path: Path) -> Laptop:
    return Laptop(tmp_path)


def test_a_folder_gets_every_setting_with_the_project_in_it(laptop: Laptop) -> None:
    done = laptop.setup("--project", "my-project", "--yes")
    assert done.returncode == 0, done.stderr
    ours = (ROOT / "tpu.env").read_text().splitlines()
    theirs = laptop.file.read_text().splitlines()
    different = [pair for pair in zip(ours, theirs, strict=True) if pair[0] != pair[1]]
    assert [after for _, after in different] == ["PROJECT_ID=my-project"]
    assert read(laptop.file).project_id == "my-project"


def test_only_what_was_asked_for_changes_in_a_file_that_is_there(laptop: Laptop) -> None:
    laptop.file.write_text(
        "# mine\nZONE=us-west4-a\n\nSERVE_SLOTS=4 \n#PROJECT_ID=x\nPROJECT_ID=old-one"
    )
    laptop.file.chmod(0o600)
    assert laptop.setup("--project", "my-project", "--zone", "us-east1-c", "--yes").returncode == 0
    assert laptop.file.read_text() == (
        "# mine\nZONE=us-east1-c\n\nSERVE_SLOTS=4 \n#PROJECT_ID=x\nPROJECT_ID=my-project\n"
    )
    assert stat.S_IMODE(laptop.file.stat().st_mode) == 0o600
    assert [file.name for file in laptop.folder.iterdir()] == ["tpu.env"]
    laptop.file.write_text("SERVE_SLOTS=4\n")
    assert laptop.setup("--project", "my-project", "--yes").returncode == 0
    assert laptop.file.read_text() == "SERVE_SLOTS=4\nPROJECT_ID=my-project\n"


def test_apis_and_the_plugin_come_after_a_yes_and_a_second_run_does_nothing(laptop: Laptop) -> None:
    laptop.enabled.write_text("storage.googleapis.com\ncompute.googleapis.com\n")
    done = laptop.setup("--project", "my-project", says="y\nyes\n")
    assert done.returncode == 0, done.stderr
    missing = " ".join(api for api in APIS if api != "compute.googleapis.com")
    assert laptop.changes == [
        f"gcloud services enable {missing} --project=my-project",
        f"claude plugin marketplace add {ROOT}",
        "claude plugin install gemma4-rust-rig@torchtpu-rs",
    ]
    laptop.record.write_text("")
    before = laptop.file.stat()
    again = laptop.setup("--project", "my-project")
    assert again.returncode == 0
    assert "[y/N]" not in again.stdout + again.stderr
    assert laptop.changes == []
    assert (laptop.file.stat().st_mtime_ns, laptop.file.stat().st_ino) == (
        before.st_mtime_ns,
        before.st_ino,
    )


@pytest.mark.parametrize("says", ["n\nn\n", "", "\n\n", "yellow\nno\n"])
def test_without_a_yes_nothing_is_enabled_or_registered_and_the_commands_are_told(
    laptop: Laptop, says: str
) -> None:
    done = laptop.setup("--project", "my-project", says=says)
    assert done.returncode == 0, done.stderr
    assert laptop.changes == []
    assert f"gcloud services enable {' '.join(APIS)} --project=my-project" in done.stdout
    assert f"claude plugin marketplace add {ROOT} && claude plugin install" in done.stdout


def test_a_dry_run_calls_nobody_changes_nothing_and_prints_every_command(laptop: Laptop) -> None:
    done = laptop.setup("--project=my-project", "--zone=us-east1-c", "--dry-run")
    assert done.returncode == 0, done.stderr
    assert laptop.record.read_text() == ""
    assert list(laptop.folder.iterdir()) == []
    commands = [line.removeprefix("+ ") for line in done.stdout.splitlines() if line[0] == "+"]
    assert commands[0].startswith("write PROJECT_ID=my-project and ZONE=us-east1-c into ")
    # As they stand they run in a shell.
    for command in commands[1:]:
        run = subprocess.run(
            ["bash", "-c", command],
            env={"PATH": str(laptop.bin), "RECORD": str(laptop.record), "ENABLED": str(laptop.enabled), "PLUGINS": str(laptop.plugins), "ACCOUNT": "me", "REFUSED": ""},
            capture_output=True, timeout=60, check=False,
        )  # fmt: skip
        assert run.returncode == 0, command
    assert laptop.changes == [
        f"gcloud services enable {' '.join(APIS)} --project=my-project",
        f"claude plugin marketplace add {ROOT}",
        "claude plugin install gemma4-rust-rig@torchtpu-rs",
    ]


def test_without_claude_the_rest_is_done(laptop: Laptop) -> None:
    (laptop.bin / "claude").unlink()
    done = laptop.setup("--project", "my-project", "--yes")
    assert done.returncode == 0, done.stderr
    assert "no claude: the rig works without it" in done.stdout
    assert laptop.changes == [f"gcloud services enable {' '.join(APIS)} --project=my-project"]


@pytest.mark.parametrize(
    ("arguments", "status", "says"),
    [
        ((), 2, "expected --project with the project that pays"),
        (("--project",), 2, "expected a value for --project"),
        (("--project", "--yes"), 2, "expected a value for --project"),
        (("--project", "My_Project"), 1, "expected the id of a project"),
        (("--project", "x; touch y"), 1, "expected the id of a project"),
        (("--project", "my-project", "--zone", "mars"), 1, "expected a zone (us-west4-a), found 'mars'"),
        (("--project", "my-project", "--fast"), 2, "expected an option of the list, found --fast"),
        (("--project", "my-project", "second"), 2, "expected one folder"),
    ],
)  # fmt: skip
def test_what_was_asked_wrongly_is_told_before_anything_changes(
    laptop: Laptop, arguments: tuple[str, ...], status: int, says: str
) -> None:
    done = laptop.setup(*arguments)
    assert (done.returncode, says in done.stderr) == (status, True), done.stderr
    assert (laptop.record.read_text(), list(laptop.folder.iterdir())) == ("", [])


def test_what_is_missing_is_told_with_what_to_do(laptop: Laptop, tmp_path: Path) -> None:
    laptop.account = ""
    nobody = laptop.setup("--project", "my-project", "--yes")
    assert nobody.returncode == 1
    assert "run gcloud auth login" in nobody.stderr
    laptop.account, laptop.refused = "me@example.com", "ERROR: PERMISSION_DENIED"
    refused = laptop.setup("--project", "my-project", "--yes")
    assert refused.returncode == 1
    assert "PERMISSION_DENIED" in refused.stderr
    assert "look whether the id is right and whether me@example.com may see it" in refused.stderr
    (laptop.bin / "gcloud").unlink()
    without = laptop.setup("--project", "my-project", "--yes")
    assert without.returncode == 1
    assert (
        "expected gcloud, found none; install it from https://cloud.google.com/sdk"
        in without.stderr
    )
    # From a tree without its own .venv.
    script = tmp_path / "tree" / "project-setup.sh"
    script.parent.mkdir()
    shutil.copy(SCRIPT, script)
    laptop.install("python3", "#!/bin/bash\n[[ $1 == --version ]] && echo Python 3.9.2; exit 1\n")
    old = laptop.setup("--project", "my-project", "--yes", script=script)
    assert old.returncode == 1
    assert "expected Python 3.11 to 3.14, found Python 3.9.2" in old.stderr
    assert laptop.changes == []


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write every file")
def test_a_file_that_may_not_be_written_is_told(laptop: Laptop) -> None:
    laptop.file.write_text("PROJECT_ID=\n")
    laptop.file.chmod(0o400)
    done = laptop.setup("--project", "my-project", "--yes")
    assert done.returncode == 1
    assert "found that it may not be written" in done.stderr


def test_the_services_are_those_that_the_rig_cannot_do_without() -> None:
    call = re.compile(r'\.(?:call|pages)\((?:"[A-Z]+", |method, )?"([a-z]+)", ')
    called = {
        name for file in (ROOT / "rig").glob("*.py") for name in call.findall(file.read_text())
    }
    # Those two only tell the doctor more, and it says so when they are off.
    called -= {"serviceusage", "cloudresourcemanager"}
    assert {f"{name}.googleapis.com" for name in called} == set(APIS)
    (line,) = re.findall(r"^apis=\((.*)\)$", SCRIPT.read_text(), re.MULTILINE)
    assert line.split() == APIS
