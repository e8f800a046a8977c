"""A machine of its own to boot things on: systemd as PID 1 of new namespaces, over this machine's files with every write thrown away.

Owns its beginning and its end; knows nothing of what is booted there. Its network is a loopback that nothing else shares.
"""

from __future__ import annotations

import ctypes
import json
import os
import shutil
import subprocess
import sys
import sysconfig
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, TypeVar

from rig.settings import ROOT

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

T = TypeVar("T")

PATIENCE_SECONDS = 90
PYTHON = f"/mnt/python/bin/python{sys.version_info.major}.{sys.version_info.minor}"
"""The interpreter that runs the tests, where every user of the machine may read it."""
PACKAGES = "/mnt/packages"
TOOLS = "/mnt/tools"
TREE = "/mnt/tree"
SEEN = {
    Path(sys.base_prefix): "/mnt/python",
    Path(sysconfig.get_path("purelib")): PACKAGES,
    Path(sysconfig.get_path("scripts")): TOOLS,
    ROOT: TREE,
}
_ENVIRONMENT = {
    "PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
    "LC_ALL": "C.UTF-8",
}
_SYSTEMD = Path("/lib/systemd/systemd")
_NAMESPACES = ("--pid", "--mount", "--ipc", "--uts", "--cgroup", "--net")
_CLONE_NEWNET = 0x40000000


def lacking() -> str | None:
    """What this machine lacks for another one inside it; None when it has everything."""
    if sys.platform != "linux" or os.geteuid() != 0:
        return "needs root on Linux for namespaces"
    for tool in ("unshare", "nsenter", "setpriv", "ip", "systemctl"):
        if shutil.which(tool) is None:
            return f"needs {tool}"
    if not _SYSTEMD.exists():
        return f"needs systemd in {_SYSTEMD}"
    if "overlay" not in Path("/proc/filesystems").read_text():
        return "needs the overlay file system"
    if _cgroups() is None:
        return "needs a cgroup2 mount that can be written"
    tried = subprocess.run(
        ["unshare", "--fork", *_NAMESPACES, "--mount-proc", "true"],
        capture_output=True,
        text=True,
        check=False,
    )
    return f"needs namespaces: {tried.stderr.strip()}" if tried.returncode else None


def _cgroups() -> Path | None:
    for line in Path("/proc/self/mounts").read_text().splitlines():
        _, where, kind, *_ = line.split()
        if kind == "cgroup2" and os.access(where, os.W_OK):
            return Path(where)
    return None


class Machine:
    """One that runs for as long as the `with` lasts; `kept` are folders of this machine that it may write."""

    def __init__(self, folder: Path, kept: Mapping[Path, str] | None = None) -> None:
        self._folder, self._kept = folder, kept or {}
        self._log = folder.with_suffix(".log")
        cgroups = _cgroups()
        assert cgroups is not None
        self._cgroup = cgroups / f"torchtpu-machine-{os.getpid()}"

    def __enter__(self) -> Self:
        mounts = [str(part) for pair in SEEN.items() for part in pair]
        mounts += [str(part) for pair in self._kept.items() for part in (*pair, "rw")]
        self._folder.mkdir(parents=True)
        self._cgroup.mkdir()
        # It dies with the process that runs the tests, whatever ends that one.
        enter = 'echo $$ >"$1/cgroup.procs" && shift && exec setpriv --pdeathsig KILL unshare --kill-child --fork "$@"'
        script = str(Path(__file__).with_name("machine.sh"))
        arguments = [str(self._cgroup), *_NAMESPACES, script, str(self._folder), *mounts]
        with self._log.open("w") as log:
            self._process = subprocess.Popen(
                ["sh", "-c", enter, "sh", *arguments],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
            )
        try:
            self.eventually(self._is_up, "systemd starts")
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        # PID 1 takes everything with it, and only this signal ends it: SIGTERM makes it start itself anew.
        self._process.kill()
        self._process.wait(PATIENCE_SECONDS)
        for _attempt in range(100):
            if self._is_cgroup_gone():
                return
            time.sleep(0.05)
        raise AssertionError(f"processes are left in {self._cgroup}")

    @property
    def pid(self) -> int:
        """Of its PID 1, as this machine counts."""
        unshare = self._process.pid
        children = Path(f"/proc/{unshare}/task/{unshare}/children").read_text().split()
        assert children, f"the machine ended: {self._log.read_text()}"
        return int(children[0])

    def path(self, path: str) -> Path:
        """A file of it, as this machine reaches it."""
        return Path(f"/proc/{self.pid}/root{path}")

    def write(self, path: str, text: str, mode: int = 0o644) -> None:
        """Puts a file there, whose folder is made."""
        file = self.path(path)
        file.parent.mkdir(parents=True, exist_ok=True)
        file.touch(mode)
        file.chmod(mode)
        file.write_text(text)

    def command(self, *command: str) -> list[str]:
        """What to start here so that `command` runs there."""
        return ["nsenter", f"--target={self.pid}", *_NAMESPACES, "--", *command]

    def try_run(
        self, *command: str, patience: float = PATIENCE_SECONDS
    ) -> subprocess.CompletedProcess[str]:
        """Runs a command there, as root, and gives its end."""
        return subprocess.run(
            self.command(*command),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            env=_ENVIRONMENT,
            timeout=patience,
            check=False,
        )

    def run(self, *command: str) -> str:
        """Runs a command there that must succeed; what it says."""
        done = self.try_run(*command)
        assert done.returncode == 0, f"{command}: {done.stdout}{done.stderr}"
        return done.stdout.strip()

    def start(self, *command: str) -> subprocess.Popen[str]:
        """Starts a command there; its output can be read as it comes."""
        return subprocess.Popen(
            self.command(*command), stdout=subprocess.PIPE, text=True, env=_ENVIRONMENT
        )

    def ask(self, path: str, body: object = None, key: str | None = None) -> tuple[int, str]:
        """One request to the server there on port 8000: status and body; 0 when nobody answers."""
        command = ["curl", "-sS", "-m", "60", "-w", "\n%{http_code}"]
        command += ["-H", f"Authorization: Bearer {key}"] if key else []
        if body is not None:
            command += ["-H", "Content-Type: application/json", "-d", json.dumps(body)]
        done = self.try_run(*command, f"http://127.0.0.1:8000{path}")
        text, _, status = done.stdout.rpartition("\n")
        return int(status), text

    def show(self, unit: str, name: str) -> str:
        """What systemd knows of a unit."""
        return self.run("systemctl", "show", "--value", f"--property={name}", unit)

    def journal(self, unit: str) -> str:
        """What a unit said and what systemd said of it."""
        return self.run("journalctl", "--no-pager", "--output=cat", f"--unit={unit}")

    def in_network(self, make: Callable[[], T]) -> T:
        """What `make` makes in the machine's network: a socket belongs to the network of the thread that opens it."""
        made: list[T] = []
        libc = ctypes.CDLL(None, use_errno=True)

        def enter_and_make() -> None:
            with Path(f"/proc/{self.pid}/ns/net").open() as network:
                if libc.setns(network.fileno(), _CLONE_NEWNET) == 0:
                    made.append(make())

        thread = threading.Thread(target=enter_and_make)
        thread.start()
        thread.join(PATIENCE_SECONDS)
        assert made, "the machine's network cannot be entered"
        return made[0]

    def add_python(self, folder: str) -> None:
        """A virtual environment with this tree and its packages, and the project's command."""
        self.run(PYTHON, "-m", "venv", "--without-pip", folder)
        library = Path(sysconfig.get_path("purelib")).relative_to(sys.prefix)
        self.write(f"{folder}/{library}/machine.pth", f"{PACKAGES}\n{TREE}\n")
        script = f"#!{folder}/bin/python\nfrom server.cli import main\nmain()\n"
        self.write(f"{folder}/bin/torchtpu-rs", script, 0o755)

    def eventually(self, condition: Callable[[], Any], what: str) -> None:
        """Waits for what happens there and has no event to wait on here."""
        end = time.monotonic() + PATIENCE_SECONDS
        while not condition():
            assert time.monotonic() < end, f"never happened: {what}\n{self._log.read_text()}"
            time.sleep(0.05)

    def _is_up(self) -> bool:
        assert self._process.poll() is None, f"the machine ended: {self._log.read_text()}"
        unshare = self._process.pid
        if not Path(f"/proc/{unshare}/task/{unshare}/children").read_text().strip():
            return False
        state = self.try_run("systemctl", "is-system-running").stdout.strip()
        # Degraded: something of this machine's own does not start there, which is nobody's business.
        return state in {"running", "degraded"}

    def _is_cgroup_gone(self) -> bool:
        for group, _, _ in os.walk(self._cgroup, topdown=False):
            try:
                Path(group).rmdir()
            except OSError:
                return False
        return True
