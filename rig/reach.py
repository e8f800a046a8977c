"""Ways onto the VM that are gcloud's to give: a shell, and a tunnel through Identity-Aware Proxy."""

from __future__ import annotations

import shlex
import shutil
import subprocess
from typing import TYPE_CHECKING

from rig.errors import RigError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rig.settings import Settings


def ssh(settings: Settings, arguments: Sequence[str]) -> list[str]:
    """The command for a shell on the VM; `arguments` go to gcloud.

    Raises:
        SettingsError: no project is set.
    """
    _ = settings.parent
    flags = [f"--project={settings.project_id}", f"--zone={settings.zone}"]
    if settings.access == "iap":
        flags.append("--tunnel-through-iap")
    return [
        # Alpha is where the VM was created, and the only track that knows the proxy.
        *("gcloud", "alpha", "compute", "tpus", "tpu-vm", "ssh", settings.node_id),
        *flags,
        *arguments,
    ]


def tunnel(settings: Settings, port: int) -> list[str]:
    """The command that brings the server to 127.0.0.1:`port` and stays.

    Raises:
        SettingsError: no project is set.
    """
    through = settings.model_copy(update={"access": "iap"})
    forward = f"127.0.0.1:{port}:127.0.0.1:{settings.serve_port}"
    return ssh(through, ["--", "-N", "-o", "ExitOnForwardFailure=yes", "-L", forward])


def text(command: Sequence[str]) -> str:
    """For a shell."""
    return shlex.join(command)


def run(command: Sequence[str]) -> int:
    """Runs it on this terminal; its exit status.

    Raises:
        RigError: gcloud is not installed.
    """
    if shutil.which(command[0]) is None:
        raise RigError(
            f"expected {command[0]} for SSH, found none: install it from https://cloud.google.com/sdk/docs/install"
        )
    return subprocess.run(command, check=False).returncode
