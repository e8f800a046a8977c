"""The VM's metadata as files, for whoever creates the VM by gcloud."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path


def write(metadata: Mapping[str, str], directory: Path) -> list[Path]:
    """A file for each key, of that name; only the user can read them, since the API key is one."""
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    written = []
    for key, value in metadata.items():
        file = directory / key
        file.unlink(missing_ok=True)
        with os.fdopen(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as opened:
            opened.write(value)
        written.append(file)
    return written
