"""`torchtpu-rig fleet`: several VMs, and one address for all of them."""

from __future__ import annotations

from pathlib import Path  # noqa: TC003 - typer reads the annotations
from typing import Annotated

import typer
from rich.table import Table
from rich.text import Text

from rig import cost, display, prices
from rig.command import File, Name, Project, Yes, Zone, end, session_of, stderr, stdout
from rig.fleet import Fleet, serve_fleet
from rig.settings import FILE

fleet_app = typer.Typer(no_args_is_help=True)

Replicas = Annotated[int, typer.Option("--replicas", min=1, max=64, help="VMs, NAME-0 and on.")]


@fleet_app.command()
def create(
    replicas: Replicas,
    settings: File = FILE,
    project: Project = None,
    zone: Zone = None,
    name: Name = None,
    yes: Yes = False,
) -> None:
    """Create the VMs, after showing what they cost together."""
    with session_of(settings, project, zone, name) as session:
        price = prices.current(session.google, session.settings)
        cost.check(session.settings, replicas, price)
        stderr.print(
            f"{replicas} VMs, each {price}; together at most USD {price.at_most * replicas:.2f}"
        )
        if not yes and not typer.confirm("Create them?", err=True):
            end("nothing was created", 1)
        Fleet(session, replicas).create(price)
        _show(Fleet(session, replicas))


@fleet_app.command()
def status(
    replicas: Replicas,
    settings: File = FILE,
    project: Project = None,
    zone: Zone = None,
    name: Name = None,
) -> None:
    """Where each VM stands."""
    with session_of(settings, project, zone, name) as session:
        _show(Fleet(session, replicas))


@fleet_app.command()
def delete(
    replicas: Replicas,
    settings: File = FILE,
    project: Project = None,
    zone: Zone = None,
    name: Name = None,
    yes: Yes = False,
) -> None:
    """Delete all of them."""
    with session_of(settings, project, zone, name) as session:
        wanted = session.settings.queued_resource
        if not yes and typer.prompt(f"Type {wanted} to delete all {replicas}", err=True) != wanted:
            end("nothing was deleted", 1)
        deleted = Fleet(session, replicas).delete()
        stderr.print(f"deleted: {', '.join(deleted) or 'there was none'}")


@fleet_app.command()
def serve(
    replicas: Replicas = 1,
    settings: File = FILE,
    project: Project = None,
    zone: Zone = None,
    name: Name = None,
    worker: Annotated[
        list[str] | None, typer.Option("--worker", help="Address of a server, instead of VMs.")
    ] = None,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port to listen on.")] = 8021,
    router_port: Annotated[int, typer.Option(help="The router's, on 127.0.0.1.")] = 8020,
    metrics_port: Annotated[int, typer.Option(help="The router's metrics, on 127.0.0.1.")] = 29000,
    worker_key_file: Annotated[
        Path | None, typer.Option(help="File with the key of the servers named by --worker.")
    ] = None,
    api_key_file: Annotated[
        Path | None,
        typer.Option(
            help="File with the key that callers must bring. Without one, anyone who reaches the port may call."
        ),
    ] = None,
) -> None:
    """One address for all of them, through vllm-router; VMs that come and go are added and removed."""
    caller_key = _key_in(api_key_file)
    if host not in {"127.0.0.1", "localhost", "::1"} and not caller_key:
        end(f"expected --api-key-file with --host {host}: the router asks nobody for a key", 1)
    if worker:
        serve_fleet(
            find_workers=lambda: worker,
            worker_key=_key_in(worker_key_file),
            caller_key=caller_key,
            host=host,
            port=port,
            router_port=router_port,
            metrics_port=metrics_port,
            on_event=lambda text: stderr.print(Text(text)),
        )
        return
    with session_of(settings, project, zone, name) as session:
        fleet = Fleet(session, replicas)
        serve_fleet(
            find_workers=fleet.addresses,
            worker_key=fleet.api_key(),
            caller_key=caller_key,
            host=host,
            port=port,
            router_port=router_port,
            metrics_port=metrics_port,
            on_event=lambda text: stderr.print(Text(text)),
        )


def _key_in(file: Path | None) -> str | None:
    if file is None:
        return None
    try:
        key = file.read_text().strip()
    except OSError as error:
        end(f"expected a key in {file}, found {error}", 1)
    if not key:
        end(f"expected a key in {file}, found an empty file", 1)
    return key


def _show(fleet: Fleet) -> None:
    table = Table("VM", "phase", "address", "ends", box=None, pad_edge=False)
    for name, status in fleet.statuses():
        node = status.node
        ends = display.ending(node.ends_at) if node and node.ends_at else ""
        table.add_row(name, status.phase, (node.external_ip if node else None) or "", ends)
    stdout.print(table)
