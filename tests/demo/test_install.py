"""demo/install.sh: the service under a real systemd user instance, the MCP server with the real Claude Code, and nothing left after."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest

from rig.settings import ROOT
from tests.rig.machine import TREE, Machine, lacking
from tests.rig.test_plugin import ALONE, requirements

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

INSTALL = ROOT / "demo" / "install.sh"
UNIT = "torchtpu-shim.service"
CLAUDE = os.environ.get("CLAUDE") or shutil.which("claude")
USER, UID = "laptop", "1500"
HOME, RUNTIME = f"/home/{USER}", f"/run/user/{UID}"
PYTHON = "/opt/laptop/bin/python"
QUESTION = {"messages": [{"role": "user", "content": "What is a TPU?"}]}


# -- on a machine with systemd ---------------------------------------------------------------------------


class Laptop:
    """A user with a service manager of their own, on a machine where a server answers on port 8000."""

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        machine.add_python("/opt/laptop")
        machine.run("useradd", "--create-home", "--uid", UID, USER)
        machine.run("install", "-d", "-o", USER, "-m", "700", RUNTIME)
        machine.run(
            *("systemd-run", "--quiet", "--unit=user-manager", f"--property=User={USER}"),
            *("--property=Delegate=yes", "--property=Type=notify"),
            *(f"--setenv=XDG_RUNTIME_DIR={RUNTIME}", f"--setenv=HOME={HOME}"),
            *("/lib/systemd/systemd", "--user"),
        )
        machine.run(
            *("systemd-run", "--quiet", "--unit=server", "--setenv=OMP_NUM_THREADS=1"),
            *("--setenv=TORCH_DEVICE_BACKEND_AUTOLOAD=0", f"--working-directory={TREE}"),
            *(PYTHON, "-m", "server", "serve"),
        )

    def run(self, *command: str) -> subprocess.CompletedProcess[str]:
        """As the user, and in their home."""
        return self.machine.try_run(
            *("setpriv", f"--reuid={UID}", f"--regid={UID}", "--clear-groups"),
            *("env", "-C", HOME, f"HOME={HOME}", f"XDG_RUNTIME_DIR={RUNTIME}", f"PYTHON={PYTHON}"),
            *command,
        )

    def install(self, *options: str) -> str:
        """Runs the script, which must succeed."""
        done = self.run(f"{TREE}/demo/install.sh", *options)
        assert done.returncode == 0, done.stdout + done.stderr
        assert done.stderr == ""
        return done.stdout

    def show(self, name: str) -> str:
        """What their service manager knows of the shim."""
        return self.run(
            "systemctl", "--user", "show", "--value", f"--property={name}", UNIT
        ).stdout.strip()

    def ask(self, path: str, body: Any = None, port: int = 8015) -> str:
        """A request to the shim; nothing when nobody answers."""
        data = ["-H", "content-type: application/json", "-d", json.dumps(body)] if body else []
        return self.machine.try_run(
            "curl", "-sS", "-m", "60", *data, f"http://127.0.0.1:{port}{path}"
        ).stdout

    def files(self) -> list[str]:
        """Everything in their home."""
        return sorted(self.machine.run("find", HOME).splitlines())


@pytest.fixture(scope="module")
def laptop(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Laptop]:
    if (lack := lacking()) is not None:
        pytest.skip(f"no machine with a systemd of its own: {lack}")
    with Machine(tmp_path_factory.mktemp("laptop") / "machine") as machine:
        yield Laptop(machine)


def test_the_service_is_installed_serves_is_changed_and_leaves_nothing(laptop: Laptop) -> None:
    before = laptop.files()

    told = laptop.install("--url", "http://127.0.0.1:8000")
    assert "http://127.0.0.1:8015 is the chat page" in told
    assert (laptop.show("ActiveState"), laptop.show("UnitFileState")) == ("active", "enabled")
    assert laptop.show("StatusText").startswith("http://127.0.0.1:8015 is the chat page")
    unit = f"{HOME}/.config/systemd/user/{UNIT}"
    verified = laptop.run("systemd-analyze", "verify", "--user", unit)
    assert (verified.returncode, verified.stdout, verified.stderr) == (0, "", "")
    laptop.machine.eventually(
        lambda: '"health":200' in laptop.ask("/shim/status"), "the server is found"
    )
    assert "A TPU is" in laptop.ask("/v1/chat/completions", QUESTION)

    # What dies is started again.
    first = laptop.show("MainPID")
    laptop.run("systemctl", "--user", "kill", "--signal=KILL", UNIT)
    laptop.machine.eventually(
        lambda: laptop.show("NRestarts") == "1" and laptop.show("ActiveState") == "active",
        "it is started again",
    )
    assert laptop.show("MainPID") != first

    # Again, and otherwise.
    files = laptop.files()
    assert laptop.install("--url", "http://127.0.0.1:8000") == told
    assert laptop.files() == files
    laptop.install("--url", "http://127.0.0.1:8000", "--port", "8016")
    assert "A TPU is" in laptop.ask("/v1/chat/completions", QUESTION, port=8016)
    assert laptop.ask("/shim/status") == ""

    laptop.install("--uninstall")
    assert laptop.files() == before
    assert laptop.show("LoadState") == "not-found"
    assert laptop.ask("/shim/status", port=8016) == ""
    assert laptop.run("pgrep", "-u", USER, "-f", "demo.shim").stdout == ""
    # And with nothing there it does nothing.
    laptop.install("--uninstall")
    assert laptop.files() == before


def test_gcloud_and_the_sign_in_are_found_where_the_shell_has_them(laptop: Laptop) -> None:
    folder = f"{HOME}/my 100% sdk/bin"
    laptop.run("mkdir", "-p", folder)
    laptop.run("sh", "-c", f"printf '#!/bin/sh\n' >'{folder}/gcloud'; chmod +x '{folder}/gcloud'")
    done = laptop.run(
        *("env", f"PATH={folder}:/usr/bin:/bin", "CLOUDSDK_CONFIG=/a $HOME/\"b\"", "TPU_API_ENDPOINT=http://127.0.0.1:9"),
        *(f"{TREE}/demo/install.sh", "--project", "my-project-123"),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    pid = laptop.show("MainPID")
    environment = laptop.machine.run("cat", f"/proc/{pid}/environ").split("\0")
    assert f"PATH={folder}:{HOME}/.local/bin" in "\n".join(environment)
    assert 'CLOUDSDK_CONFIG=/a $HOME/"b"' in environment
    assert "PROJECT_ID=my-project-123" in environment
    settings = laptop.machine.path(f"{HOME}/.config/torchtpu-rs/demo.env")
    assert settings.stat().st_mode & 0o777 == 0o600
    laptop.install("--uninstall")
    laptop.run("rm", "-r", f"{HOME}/my 100% sdk")


def test_a_port_that_is_taken_fails_the_installation(laptop: Laptop) -> None:
    done = laptop.run(f"{TREE}/demo/install.sh", "--port", "8000")
    assert done.returncode == 1
    assert "expected the service to start, found an error" in done.stderr
    # It would be taken the next time, too.
    assert (laptop.show("ExecMainStatus"), laptop.show("NRestarts")) == ("78", "0")
    laptop.install("--uninstall")
    assert laptop.show("LoadState") == "not-found"


# -- anywhere --------------------------------------------------------------------------------------------


@pytest.fixture
def home(tmp_path: Path) -> Path:
    place = tmp_path / "a home"
    place.mkdir()
    return place


def install(
    home: Path, *options: str, path: str | None = None, tree: Path = ROOT
) -> subprocess.CompletedProcess[str]:
    """Without a service manager."""
    return subprocess.run(
        [str(tree / "demo" / "install.sh"), *options],
        env={"HOME": str(home), "PATH": path or "/usr/bin:/bin", "PYTHON": sys.executable,
             "DISABLE_TELEMETRY": "1", "DISABLE_AUTOUPDATER": "1", "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1"},
        cwd=home, capture_output=True, text=True, timeout=100, check=False,
    )  # fmt: skip


def test_without_systemd_the_command_for_a_terminal_is_told(home: Path) -> None:
    done = install(home, "--project", "my-project-123", "--port", "8017")
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    at = lines.index("· no systemd user instance here; keep the shim running in a terminal:")
    assert lines[at + 1].strip() == f"{ROOT}/demo/launch shim --project my-project-123 --port 8017"
    assert any(line.startswith("· no claude here; where it is: claude mcp add ") for line in lines)
    (server,) = json.loads(lines[-1])["mcpServers"].values()
    assert (server["command"], server["args"]) == (f"{ROOT}/demo/launch", ["mcp_server"])
    assert server["env"]["TORCHTPU_SHIM_URL"] == "http://127.0.0.1:8017"
    assert list(home.iterdir()) == []
    assert install(home, "--uninstall").returncode == 0


@pytest.mark.parametrize(
    ("options", "status", "told"),
    [
        (["--project", "x", "--url", "http://h"], 2, "expected --project or --url, found both"),
        (["--project", "Not a project"], 1, "expected the id of a project (my-project-123), found 'Not a project'"),
        (["--project"], 2, "expected a value for --project, found none"),
        (["--url", "http://h/$(touch x)"], 1, "expected an address like http://127.0.0.1:8000"),
        (["--url", "http://h", "--api-key-file", "/no/such"], 1, "expected an API key in /no/such"),
        (["--port", "0"], 1, "expected a port (8015), found '0'"),
        (["--frobnicate"], 2, "expected an option of the list, found --frobnicate"),
    ],
)  # fmt: skip
def test_options_that_are_wrong_change_nothing(
    home: Path, options: list[str], status: int, told: str
) -> None:
    done = install(home, *options)
    assert done.returncode == status
    assert told in done.stderr
    assert list(home.iterdir()) == []


@pytest.fixture
def claude(home: Path, tmp_path: Path) -> Callable[..., subprocess.CompletedProcess[str]]:
    """The real one, on a PATH where the script finds it."""
    if CLAUDE is None:
        pytest.skip("Claude Code is not installed: set CLAUDE to its command")
    bin_ = tmp_path / "bin"
    bin_.mkdir()
    (bin_ / "claude").symlink_to(CLAUDE)
    path = f"{bin_}:/usr/bin:/bin"

    def run(*command: str) -> subprocess.CompletedProcess[str]:
        if command[0] == "install":
            return install(home, *command[1:], path=path)
        return subprocess.run(
            ["claude", *command],
            env={"HOME": str(home), "PATH": path}, cwd=home,
            capture_output=True, text=True, timeout=100, check=False,
        )  # fmt: skip

    return run


def servers(home: Path) -> dict[str, Any]:
    """What Claude Code has registered for the user."""
    found: dict[str, Any] = json.loads((home / ".claude.json").read_text())["mcpServers"]
    return found


def test_claude_code_takes_the_server_connects_to_it_and_forgets_it(
    home: Path, claude: Callable[..., subprocess.CompletedProcess[str]]
) -> None:
    for port in ("8015", "8015", "8017"):
        done = claude("install", "--port", port)
        assert done.returncode == 0, done.stderr
        assert "✔ Claude Code has torchtpu-rs-demo" in done.stdout
    (server,) = servers(home).values()
    assert server["command"] == f"{ROOT}/demo/launch"
    assert server["env"]["TORCHTPU_SHIM_URL"] == "http://127.0.0.1:8017"
    listed = claude("mcp", "list")
    assert "torchtpu-rs-demo" in listed.stdout
    assert "Connected" in listed.stdout, listed.stdout
    done = claude("install", "--uninstall")
    assert "✔ removed torchtpu-rs-demo from Claude Code" in done.stdout
    assert servers(home) == {}
    assert claude("install", "--uninstall").returncode == 0


def test_the_rigs_packages_are_all_that_the_demo_needs() -> None:
    script = ALONE.replace("import rig.cli, rig.mcp_server", "import demo.shim, demo.mcp_server")
    assert "demo.shim" in script
    done = subprocess.run(
        [sys.executable, "-c", script, *requirements()],
        cwd=ROOT, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr


def test_the_launcher_starts_only_what_is_the_demos() -> None:
    done = subprocess.run(
        [str(ROOT / "demo" / "launch"), "asking"], capture_output=True, text=True, timeout=60, check=False
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (2, "")
    assert "expected shim or mcp_server, found 'asking'" in done.stderr
