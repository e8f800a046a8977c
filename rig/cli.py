"""The `torchtpu-rig` command: what an operator asks for, shown on a terminal."""

from __future__ import annotations

import json
import os
from pathlib import Path  # noqa: TC003 - typer reads the annotations
from typing import TYPE_CHECKING, Annotated

import typer
from rich.text import Text

from rig import capacity, cost, display, doctor, endpoint, plan, prices, reach, render, replies
from rig.bundle import bundle, metadata
from rig.command import (
    DAY,
    STILL_WAITING,
    AsJson,
    File,
    Name,
    Poll,
    Project,
    Wait,
    Yes,
    Zone,
    end,
    session_of,
    stderr,
    stdout,
    told,
)
from rig.fleet_cli import fleet_app
from rig.records import Record
from rig.settings import FILE, read

if TYPE_CHECKING:
    from rig.session import Session

app = typer.Typer(
    name="torchtpu-rig",
    help="Create, watch and delete a Cloud TPU VM that serves Gemma 4 in Rust.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)
app.add_typer(fleet_app, name="fleet", help="Several VMs behind one router.")


@app.command("plan")
def plan_(
    settings: File = FILE,
    project: Project = None,
    zone: Zone = None,
    name: Name = None,
    as_json: AsJson = False,
) -> None:
    """Show what would be created, what it costs and the gcloud command that would do the same. Asks nobody."""
    with told():
        found = read(settings, project_id=project, zone=zone, queued_resource=name)
        wanted = plan.plan(found, metadata(found, None, bundle()))
        if as_json:
            stdout.print_json(json.dumps(display.request(wanted)))
            return
        stdout.print(display.plan_table(found, wanted, cost.check(found)))
        stdout.print("\nThe same by gcloud, after `torchtpu-rig render rendered`:\n")
        stdout.print(Text(plan.gcloud(found, "rendered")), soft_wrap=True)


@app.command("render")
def render_(
    directory: Path,
    settings: File = FILE,
    project: Project = None,
    zone: Zone = None,
    name: Name = None,
) -> None:
    """Write the VM's metadata, a file for each key, for the gcloud command that `plan` prints."""
    with told():
        found = read(settings, project_id=project, zone=zone, queued_resource=name)
        key = None if found.api_key_secret else Record(found).api_key()
        written = render.write(metadata(found, key, bundle()), directory)
        stderr.print(f"{len(written)} files in {directory}, the API key among them: keep it")


@app.command()
def create(
    settings: File = FILE,
    project: Project = None,
    zone: Zone = None,
    name: Name = None,
    yes: Yes = False,
    wait: Annotated[bool, typer.Option(help="Follow until it serves.")] = True,
    timeout: Wait = DAY,
    poll_seconds: Poll = 15,
) -> None:
    """Create the VM, after showing what it costs; then follow it until it serves. A second time adopts what is there."""
    with session_of(settings, project, zone, name, poll_seconds) as session:
        there = session.rig.status().resource
        if there is None:
            _create(session, yes)
        else:
            session.rig.adopt(there)
            stderr.print(f"{there.short_name} is there already, {there.state}")
            for difference in session.rig.differences(there):
                stderr.print(Text(f"  {difference} (delete it and create it again for that)"))
        if wait:
            _follow(session, timeout)


def _create(session: Session, yes: bool) -> None:
    price = prices.current(session.google, session.settings)
    cost.check(session.settings, found=price)
    stderr.print(f"{session.settings.queued_resource} in {session.settings.zone}: {price}")
    if not yes and not typer.confirm("Create it?", err=True):
        end("nothing was created", 1)
    session.rig.create(price)
    wanted = session.settings
    stderr.print(replies.initiated(wanted.queued_resource, wanted.zone, wanted.checkpoints[0]))


@app.command()
def watch(
    settings: File = FILE,
    project: Project = None,
    zone: Zone = None,
    name: Name = None,
    timeout: Wait = DAY,
    poll_seconds: Poll = 15,
) -> None:
    """Follow the VM until it serves, fails or is gone."""
    with session_of(settings, project, zone, name, poll_seconds) as session:
        _follow(session, timeout)


def _follow(session: Session, timeout: float) -> None:
    try:
        last = display.follow(session.rig.watch(timeout), session.settings, stdout)
    except KeyboardInterrupt:
        end(
            "stopped watching; the VM goes on and costs (torchtpu-rig watch, torchtpu-rig delete)",
            130,
        )
    if last is None or not last.is_settled:
        end(f"still {last.phase if last else 'unknown'} after {timeout:g} s", STILL_WAITING)
    if last.phase != "serving":
        end(
            last.advice(session.settings) or f"{session.settings.queued_resource} is {last.phase}",
            1,
        )


@app.command()
def status(
    settings: File = FILE,
    project: Project = None,
    zone: Zone = None,
    name: Name = None,
    as_json: AsJson = False,
) -> None:
    """Where the VM stands, how long it has left, and what holds quota for nothing."""
    with session_of(settings, project, zone, name) as session:
        now, holding = session.rig.status(), session.rig.holding_quota()
        if as_json:
            found = display.as_json(now, holding)
            stdout.print_json(json.dumps(found))
            return
        stdout.print(display.status_table(now, session.settings, session.price()))
        if advice := now.advice(session.settings):
            stderr.print(Text(advice), soft_wrap=True)
        for one in holding:
            stdout.print(
                Text(
                    f"{one.short_name} in {one.zone} is {one.state} and holds quota: "
                    f"torchtpu-rig delete --zone {one.zone} --name {one.short_name}"
                )
            )


@app.command()
def logs(
    settings: File = FILE,
    project: Project = None,
    zone: Zone = None,
    name: Name = None,
    server: Annotated[
        bool, typer.Option("--server", help="The server's journal, by SSH through gcloud.")
    ] = False,
) -> None:
    """What the VM has published of its boot, without SSH; the end of the log where a stage failed."""
    with session_of(settings, project, zone, name) as session:
        if server:
            reach.run(
                reach.ssh(session.settings, ["--command", "sudo journalctl -u torchtpu-rs -n 200"])
            )
            return
        boot = session.rig.status().boot
        if boot.stage is None:
            end("the VM has published nothing yet", STILL_WAITING)
        stdout.print(Text("\n".join(part for part in (boot.progress.rstrip(), boot.stage) if part)))


@app.command()
def address(
    settings: File = FILE, project: Project = None, zone: Zone = None, name: Name = None
) -> None:
    """The server's address, for OPENAI_BASE_URL. The key's file is told on stderr, the key never."""
    with session_of(settings, project, zone, name) as session:
        stdout.print(f"{endpoint.address(session)}/v1", soft_wrap=True)
        if session.settings.api_key_secret:
            where = f"Secret Manager, {session.settings.api_key_secret}"
        else:
            where = str(session.rig.record.api_key_file)
        stderr.print(Text(f"API key: {where}"), soft_wrap=True)


@app.command("doctor")
def doctor_(
    settings: File = FILE, project: Project = None, zone: Zone = None, name: Name = None
) -> None:
    """Look for what would make creating fail, before it costs anything."""
    with session_of(settings, project, zone, name) as session:
        if not display.findings(doctor.examine(session), stdout):
            raise typer.Exit(1)


@app.command("capacity")
def capacity_(
    settings: File = FILE, project: Project = None, zone: Zone = None, name: Name = None
) -> None:
    """Zones that have the chip, with prices and what was last refused. Creates nothing."""
    with session_of(settings, project, zone, name) as session:
        stdout.print(display.offers_table(capacity.find(session)))


@app.command("cost")
def cost_(
    settings: File = FILE, project: Project = None, zone: Zone = None, name: Name = None
) -> None:
    """What a run costs at most, by the price of today."""
    with session_of(settings, project, zone, name) as session:
        found = prices.current(session.google, session.settings)
        stdout.print(Text(str(found)), soft_wrap=True)
        cost.check(session.settings, found=found)


@app.command()
def check(
    settings: File = FILE, project: Project = None, zone: Zone = None, name: Name = None
) -> None:
    """Ask the server itself: health, model, device, counters."""
    with session_of(settings, project, zone, name) as session:
        found = endpoint.check(endpoint.address(session), session.surroundings.api_key())
        stdout.print_json(found.model_dump_json())


@app.command()
def delete(
    settings: File = FILE,
    project: Project = None,
    zone: Zone = None,
    name: Name = None,
    yes: Yes = False,
) -> None:
    """Delete the VM, its queued resource and, with the last one, the way in."""
    with session_of(settings, project, zone, name) as session:
        wanted = session.settings.queued_resource
        if not yes and typer.prompt(f"Type {wanted} to delete it", err=True) != wanted:
            end("nothing was deleted", 1)
        existed = session.delete()
        stderr.print(f"{wanted} is deleted" if existed else f"there was no {wanted}")


@app.command(context_settings={"ignore_unknown_options": True})
def ssh(
    arguments: Annotated[list[str] | None, typer.Argument(help="For gcloud's ssh.")] = None,
    settings: File = FILE,
    project: Project = None,
    zone: Zone = None,
    name: Name = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only print the command.")] = False,
) -> None:
    """A shell on the VM, by gcloud."""
    with told():
        found = read(settings, project_id=project, zone=zone, queued_resource=name)
        _run(reach.ssh(found, arguments or []), dry_run)


@app.command()
def tunnel(
    settings: File = FILE,
    project: Project = None,
    zone: Zone = None,
    name: Name = None,
    port: Annotated[int, typer.Option(help="Here, on 127.0.0.1.")] = 18000,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only print the command.")] = False,
) -> None:
    """The server on a local port, through Identity-Aware Proxy: no port of the VM is open to the internet."""
    with told():
        found = read(settings, project_id=project, zone=zone, queued_resource=name)
        _run(reach.tunnel(found, port), dry_run)


def _run(command: list[str], dry_run: bool) -> None:
    if dry_run:
        stdout.print(Text(reach.text(command)), soft_wrap=True)
        return
    raise typer.Exit(reach.run(command))


def main() -> None:
    """The entry point."""
    # A width for files and pipes: rich takes 80 columns, which breaks addresses.
    os.environ.setdefault("COLUMNS", str(stdout.width if stdout.is_terminal else 160))
    app()
