"""The sentences that readers of the published rig look for, from plain values. Whoever answers a person says them with these."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable


def initiated(name: str, zone: str, checkpoint: str) -> str:
    """A VM was asked for."""
    return f"🚀 Queued Resource {name} creation initiated in {zone}, serving `{checkpoint}`."


def stages(done: Iterable[tuple[str, str]], current: str | None, failure: str | None) -> list[str]:
    """A line for each stage that has begun, as the boot publishes them; those that are over with their time."""
    over = dict(done)
    lines = [f"STAGE: {name} ({took})" for name, took in over.items()]
    name = (current or "").partition(": ")[2]
    if name and name not in over:
        lines.append(f"STAGE: {name}")
    return [*lines, failure] if failure else lines


def deleted(name: str, zone: str) -> str:
    """A VM and its queued resource are on their way out."""
    return f"🗑️ Queued Resource {name} deletion initiated in {zone}."


def holding_quota(name: str, zone: str, state: str, do: str) -> str:
    """A queued resource without a VM counts against the quota."""
    return f"⚠️ {name} in {zone} is {state} and holds quota until it is deleted: {do}"


def found(ok: bool, name: str, text: str, do: str | None) -> str:
    """One line of a check, and what to do where it is not good."""
    line = f"{'✅' if ok else '❌'} {name}: {text}"
    return f"{line}\n   {do}" if do and not ok else line


def endpoint(url: str, serving: bool, text: str, do: str | None) -> str:
    """Whether a server answers."""
    line = f"{'🟢' if serving else '🔴'} {url}: {text}"
    return f"{line}\n{do}" if do else line
