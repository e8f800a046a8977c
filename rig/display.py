"""The rig on a terminal: plans, states, a boot that moves. Everything is text for people; scripts get `--json`."""

from __future__ import annotations

import contextlib
import copy
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from rich.live import Live
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

from rig.states import STAGES

if TYPE_CHECKING:
    from collections.abc import Iterable
    from datetime import timedelta

    from rich.console import Console, RenderableType

    from rig.capacity import Offer
    from rig.cost import Cost
    from rig.doctor import Finding
    from rig.plan import Plan
    from rig.provision import Status
    from rig.settings import Settings
    from rig.states import QueuedResource

SIGNS = {"done": "[green]✓[/]", "failed": "[red]✗[/]", "open": "[dim]·[/]"}


def plan_table(settings: Settings, wanted: Plan, price: Cost) -> Table:
    """What would be created."""
    node = wanted.body["tpu"]["nodeSpec"][0]["node"]
    size = sum(len(key) + len(value.encode()) for key, value in node["metadata"].items())
    return _facts(
        ("queued resource", f"{settings.queued_resource} in {settings.zone}"),
        ("chip", f"{settings.accelerator_type}, {settings.provisioning_model}"),
        ("image", settings.runtime_version),
        ("serves", settings.checkpoints[0]),
        ("steps", settings.mode),
        ("way in", way_in(settings)),
        ("waits for a chip", short(settings.valid_until)),
        ("runs", f"at most {short(settings.max_run_duration)}"),
        ("costs", str(price)),
        ("cap", f"USD {settings.max_cost_usd:.2f} (MAX_COST_USD)"),
        (
            "metadata",
            f"{size / 1024:.0f} KiB, sources {node['metadata']['bundle-sha256'][:12]}",
        ),
    )


def request(wanted: Plan) -> dict[str, Any]:
    """The request's body, with the size of each metadata value in its place."""
    body = copy.deepcopy(wanted.body)
    for spec in body["tpu"]["nodeSpec"]:
        values = spec["node"]["metadata"]
        spec["node"]["metadata"] = {
            key: f"({len(value.encode())} bytes)" for key, value in values.items()
        }
    return body


def way_in(settings: Settings) -> str:
    """Who will reach the server, in words."""
    if settings.access == "iap":
        return "Identity-Aware Proxy only (torchtpu-rig tunnel)"
    who = settings.source_range or "this machine's address, /32"
    return f"port {settings.serve_port} from {who}, with an API key"


def status_table(status: Status, settings: Settings, price: Cost | None) -> Table:
    """Where the rig stands."""
    rows = [("queued resource", f"{settings.queued_resource} in {settings.zone}")]
    rows.append(("phase", status.phase))
    resource, node = status.resource, status.node
    if resource:
        by = f", by {resource.initiator}" if resource.initiator else ""
        rows.append(("state", f"{resource.state}{by}"))
        if resource.error:
            rows.append(("error", resource.error.message))
        if price and status.phase in {"booting", "serving"}:
            rows.append(("price", f"USD {price.usd_per_hour:.2f} an hour"))
    if node:
        health = f", {node.health}" if node.health else ""
        rows.append(("VM", f"{node.state}{health}"))
        rows.append(("address", node.external_ip or "none yet"))
        if node.ends_at:
            rows.append(("ends", ending(node.ends_at)))
    if status.boot.stage:
        rows.append(("boot", status.boot.stage))
    if status.boot.keeper:
        rows.append(("keeper", status.boot.keeper))
    return _facts(*rows)


def as_json(status: Status, holding: Iterable[QueuedResource]) -> dict[str, Any]:
    """The same for scripts."""
    resource, node, boot = status.resource, status.node, status.boot
    ends = node.ends_at if node else None
    return {
        "phase": status.phase,
        "state": resource.state if resource else None,
        "error": resource.error.message if resource and resource.error else None,
        "address": node.external_ip if node else None,
        "ends_at": ends.isoformat() if ends else None,
        "seconds_left": int((ends - datetime.now(UTC)).total_seconds()) if ends else None,
        "stage": boot.stage,
        "stages": dict(boot.done),
        "failure": boot.failure,
        "keeper": boot.keeper,
        "holding_quota": [{"name": one.short_name, "zone": one.zone} for one in holding],
    }


def ending(at: datetime, now: datetime | None = None) -> str:
    """`in 3 h 20 min (12:00 UTC)`."""
    left = at - (now or datetime.now(UTC))
    clock = f"{at.astimezone(UTC):%H:%M} UTC"
    return f"in {short(left)} ({clock})" if left.total_seconds() > 0 else f"since {clock}"


def short(time: timedelta) -> str:
    """`4 h`, `3 h 20 min`, `45 s`."""
    seconds = int(time.total_seconds())
    if 0 < seconds < 60:
        return f"{seconds} s"
    hours, minutes = divmod(seconds // 60, 60)
    parts = [f"{hours} h"] * bool(hours) + [f"{minutes} min"] * bool(minutes or not hours)
    return " ".join(parts)


def findings(found: Iterable[Finding], console: Console) -> bool:
    """Shows each finding as it comes; whether all are good."""
    good = True
    for one in found:
        console.print(f"{SIGNS['done' if one.ok else 'failed']} {one.name}: ", end="")
        console.print(Text(one.text))
        if one.do:
            console.print(Text(f"    {one.do}"))
        good = good and one.ok
    return good


def offers_table(offers: Iterable[Offer]) -> Table:
    """Where a chip may be had."""
    table = Table("zone", "provisioning", "USD per hour", "last refusal", box=None, pad_edge=False)
    for offer in offers:
        price = "unknown" if offer.usd_per_hour is None else f"{offer.usd_per_hour:.2f}"
        has = offer.provisioning_model if offer.has_type else f"[dim]{offer.provisioning_model}[/]"
        table.add_row(offer.zone, has, price, Text(offer.last_refusal or ""))
    return table


def follow(statuses: Iterable[Status], settings: Settings, console: Console) -> Status | None:
    """Shows a boot as it goes on: a table that moves on a terminal, lines elsewhere. The last status."""
    last: Status | None = None
    told: set[str] = set()
    with contextlib.ExitStack() as open_:
        live = open_.enter_context(Live(console=console)) if console.is_terminal else None
        for status in statuses:
            last = status
            if live:
                live.update(moving(status, settings))
                continue
            for line in plain(status):
                if line not in told:
                    told.add(line)
                    console.print(Text(line))
    return last


def plain(status: Status) -> list[str]:
    """The same in lines, each of which is said once."""
    if status.resource is None:
        return ["there is no queued resource"]
    lines = [str(status.resource.state)]
    boot = status.boot
    begun = [name for name, _ in boot.done]
    current = (boot.stage or "").removeprefix("STAGE: ").removeprefix("FAILED: ")
    if current and current not in begun:
        begun.append(current)
    lines += [f"STAGE: {name}" for name in begun]
    if boot.failure:
        lines.append(boot.failure)
    if status.phase == "serving" and status.node and status.node.external_ip:
        lines.append(f"serving at {status.node.external_ip}")
    return lines


def moving(status: Status, settings: Settings) -> RenderableType:
    """The same as a table with one row for each stage."""
    rows = Table(box=None, pad_edge=False, show_header=False)
    state = status.resource.state if status.resource else "none"
    waits = status.phase == "waiting"
    rows.add_row(
        Spinner("dots") if waits else Text.from_markup(SIGNS["done"]),
        settings.queued_resource,
        str(state),
    )
    done = dict(status.boot.done)
    current = (status.boot.stage or "").partition(": ")[2]
    for name in STAGES:
        sign: RenderableType = Text.from_markup(SIGNS["open"])
        if name in done:
            sign = Text.from_markup(SIGNS["done"])
        elif name == current:
            sign = Text.from_markup(SIGNS["failed"]) if status.boot.failed else Spinner("dots")
        # Begun when is for the log.
        rows.add_row(sign, name, done.get(name, "").partition(",")[0])
    if status.boot.failure:
        rows.add_row("", "", Text(status.boot.failure))
    return rows


def _facts(*rows: tuple[str, str]) -> Table:
    table = Table(box=None, pad_edge=False, show_header=False)
    table.add_column(style="dim", no_wrap=True)
    table.add_column(overflow="fold")
    for key, value in rows:
        table.add_row(key, Text(value))
    return table
