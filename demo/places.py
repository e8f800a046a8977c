"""Where a server may be, and finding it: an address that was given, the rig's VM by Google's API, or a server on this machine.

A look blocks and may take a minute, so it is for a thread. Knows nothing of requests or of how often it is asked.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

import httpx

from rig.endpoint import TUNNEL_PORT
from rig.errors import RigError
from rig.google import GoogleError, UnreachableError
from rig.session import opened
from rig.settings import SettingsError, read
from rig.states import STAGES
from rig.tokens import TokenError

if TYPE_CHECKING:
    from pathlib import Path

    from rig.provision import Status
    from rig.settings import Settings
    from rig.states import Boot

LOCAL = "http://127.0.0.1:8000"
LOCAL_SECONDS = 2.0

DOES = {
    "python": "installing Python",
    "torch": "installing PyTorch and TorchTPU",
    "rust": "installing Rust",
    "crate": "compiling the model",
    "weights": "fetching the weights",
    "smoke": "trying the chip",
    "unit": "installing the service",
    "serving": "starting the server",
}
"""What each stage of a boot is busy with."""


class LookError(RuntimeError):
    """Nobody could be asked; what was known before may still be true."""


@dataclass(frozen=True)
class Place:
    """What a look found."""

    kind: Literal["vm", "url", "router"]
    url: str | None = None
    """Where requests go; None where there is nothing to send them to."""
    key: str | None = field(default=None, repr=False)
    problem: str | None = None
    """Why there is no address, or what is wrong there, and what to do."""
    queued_resource: str | None = None
    zone: str | None = None
    project: str | None = None
    phase: str | None = None
    stages: tuple[tuple[str, str], ...] = ()
    """Of a boot that has begun, all of them: name, and what it does or how long it took."""
    stage: str | None = None
    """The one that runs or failed."""


Look = Callable[[], Place]
"""Raises LookError."""


def given(url: str, kind: Literal["url", "router"], key: str | None) -> Look:
    """An address that somebody knows."""
    place = Place(kind, url, key)
    return lambda: place


def by_the_rig(file: Path, key: str | None = None, **settings: Any) -> Look:
    """The VM of the settings in `file`, in which `settings` win, read anew at each look; without a project, a server on this machine.

    `key` is for the latter; the rig knows its VM's.
    """

    def look() -> Place:
        project = settings.get("project_id") or os.environ.get("PROJECT_ID")
        if not project and not file.is_file():
            # Installed without the tree.
            return _on_this_machine(key)
        try:
            wanted = read(file, **settings)
        except SettingsError as error:
            raise LookError(f"The shim cannot read its settings. {error}") from error
        return _vm(wanted) if wanted.project_id else _on_this_machine(key)

    return look


def _on_this_machine(key: str | None) -> Place:
    try:
        httpx.get(f"{LOCAL}/health", timeout=LOCAL_SECONDS, trust_env=False)
    except httpx.TransportError:
        problem = (
            f"The shim has nowhere to send requests: expected a project, --url or a server at {LOCAL}, found none of them. "
            "Set PROJECT_ID in tpu.env, or start a server with `torchtpu-rs serve`."
        )
        return Place("url", problem=problem)
    return Place("url", LOCAL, key)


def _vm(settings: Settings) -> Place:
    try:
        with opened(settings) as session:
            status = session.rig.status()
            has_address = status.node is not None and status.node.external_ip is not None
            key = session.surroundings.api_key() if has_address else None
    except TokenError as error:
        raise LookError(f"laptop → Google: nobody is signed in. {error}") from error
    except (GoogleError, UnreachableError, RigError) as error:
        raise LookError(f"laptop → Google: where the VM is could not be asked. {error}") from error
    return place_of(settings, status, key)


def place_of(settings: Settings, status: Status, key: str | None) -> Place:
    """What the service said, as a place."""
    boot = status.boot
    name = (boot.stage or "").partition(": ")[2]
    return Place(
        "vm",
        _address(settings, status),
        key,
        _problem(settings, status),
        settings.queued_resource,
        settings.zone,
        settings.project_id,
        status.phase,
        _stages(boot),
        None if boot.is_done else name or None,
    )


def _address(settings: Settings, status: Status) -> str | None:
    if status.node is None or status.node.external_ip is None:
        return None
    if settings.access == "iap":
        # No port is open; `torchtpu-rig tunnel` brings it here.
        return f"http://127.0.0.1:{TUNNEL_PORT}"
    return f"http://{status.node.external_ip}:{settings.serve_port}"


def _problem(settings: Settings, status: Status) -> str | None:
    what = f"{settings.queued_resource} in {settings.zone}, project {settings.project_id}"
    told = {
        "absent": f"There is no {what}. `torchtpu-rig create` makes one.",
        "deleting": f"{what} is being deleted. `torchtpu-rig create` makes another one in a few minutes.",
        "waiting": f"{what} waits for a chip. `torchtpu-rig watch` follows it.",
        "ended": f"The VM of {what} has ended.",
        "failed": f"The VM of {what} failed.",
        "booting": f"The VM of {what} boots. `torchtpu-rig watch` follows it.",
        "serving": f"The VM of {what} has no address.",
    }[status.phase]
    if _address(settings, status) and not status.boot.failed:
        return None
    parts = (told, status.boot.failure, status.advice(settings))
    return " ".join(part for part in parts if part)


def _stages(boot: Boot) -> tuple[tuple[str, str], ...]:
    if not boot.stage and not boot.done:
        return ()
    # `21 s, began 2026-12-01T10:00:00Z`
    took = {name: text.partition(",")[0] for name, text in boot.done}
    return tuple(
        (name, f"{DOES[name]}: {took[name]}" if name in took else DOES[name]) for name in STAGES
    )
