"""How a command ends when what it was given is wrong: a line on stderr and a status. Knows no command."""

from __future__ import annotations

from typing import TYPE_CHECKING, NoReturn

import typer

if TYPE_CHECKING:
    from pathlib import Path

EX_CONFIG = 78
"""Settings are wrong (sysexits.h): starting again would change nothing, and systemd can be told so."""


def key_in(file: Path | None) -> str | None:
    """The key in `file`, without white space around it; None without a file."""
    if file is None:
        return None
    try:
        key = file.read_text().strip()
    except (OSError, UnicodeDecodeError) as error:
        fail(f"--api-key-file: expected a file with a key, found {file}: {error}", EX_CONFIG)
    if not key:
        fail(f"--api-key-file: expected a key in {file}, found an empty file", EX_CONFIG)
    return key


def fail(message: str, code: int = 1) -> NoReturn:
    """Ends the command with `message` on stderr and `code` as its status."""
    typer.echo(f"error: {message}", err=True)
    raise typer.Exit(code)
