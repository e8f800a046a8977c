"""What the commands of `torchtpu-rig` have in common: their options, a session, and how errors end them.

Exit status: 0 done, 1 refused or failed, 3 still waiting, 78 settings are wrong (EX_CONFIG). stdout is for data, stderr for everything else.
"""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer
from rich.console import Console
from rich.text import Text

from rig.session import FAULTS, Session, opened
from rig.settings import SettingsError, read

if TYPE_CHECKING:
    from collections.abc import Iterator

EX_CONFIG = 78
STILL_WAITING = 3

stdout, stderr = Console(), Console(stderr=True)

File = Annotated[Path, typer.Option("--settings", envvar="RIG_SETTINGS", help="The tpu.env.")]
Project = Annotated[str | None, typer.Option("--project", help="Instead of PROJECT_ID.")]
Zone = Annotated[str | None, typer.Option("--zone", help="Instead of ZONE.")]
Name = Annotated[str | None, typer.Option("--name", help="Instead of QUEUED_RESOURCE.")]
Yes = Annotated[bool, typer.Option("--yes", help="Do not ask.")]
AsJson = Annotated[bool, typer.Option("--json", help="For scripts.")]
Poll = Annotated[float, typer.Option("--poll-seconds", hidden=True)]
Wait = Annotated[int, typer.Option("--timeout", help="Seconds to wait at most.")]
DAY = 24 * 3600


@contextlib.contextmanager
def told() -> Iterator[None]:
    """Errors that a person can do something about, as text and an exit status."""
    try:
        yield
    except SettingsError as error:
        end(str(error), EX_CONFIG)
    except FAULTS as error:
        end(str(error), 1)


@contextlib.contextmanager
def session_of(
    file: Path, project: str | None, zone: str | None, name: str | None, poll: float = 15
) -> Iterator[Session]:
    """A session with the settings of `file`, in which options win."""
    with told():
        settings = read(file, project_id=project, zone=zone, queued_resource=name)
        _ = settings.parent  # A project is needed for everything but `plan`.
        with opened(settings, poll) as session:
            yield session


def end(text: str, status: int) -> NoReturn:
    """Say why, and stop."""
    stderr.print(Text(text, style="red"))
    raise typer.Exit(status)
