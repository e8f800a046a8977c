"""What this machine remembers of a rig: the id of the request that creates it, and its API key. Files that only the user can read."""

from __future__ import annotations

import os
import secrets
import uuid
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from rig.settings import Settings


def home() -> Path:
    """The folder of all records (`XDG_STATE_HOME`)."""
    base = os.environ.get("XDG_STATE_HOME")
    return (Path(base) if base else Path.home() / ".local" / "state") / "torchtpu-rig"


def new_key() -> str:
    """An API key that nobody has."""
    return secrets.token_urlsafe(32)


class Record:
    """One rig's."""

    def __init__(self, settings: Settings, folder: Path | None = None) -> None:
        name = "-".join([settings.project_id or "", settings.zone, settings.queued_resource])
        self._folder = (folder or home()) / name

    def request_id(self) -> str:
        """The id of the request that creates the rig: the same until `forget`, so that asking again creates nothing twice."""
        return self._once("request-id", lambda: str(uuid.uuid4()))

    def api_key(self) -> str:
        """The key that callers of the VM's server need, made at first use."""
        return self._once("api-key", new_key)

    @property
    def api_key_file(self) -> Path:
        """Where the key is, once there is one."""
        return self._folder / "api-key"

    def known_api_key(self) -> str | None:
        """The key, if there is one."""
        file = self.api_key_file
        return file.read_text() if file.is_file() else None

    @property
    def operation(self) -> str | None:
        """Name of the operation that creates the rig, as long as nothing has come of it."""
        file = self._folder / "operation"
        return file.read_text() if file.is_file() else None

    def begun(self, operation: str) -> None:
        """The service works on it under this name."""
        new = self._folder / "operation.new"
        new.write_text(operation)
        new.replace(self._folder / "operation")

    def forget_request(self) -> None:
        """The service refused: the next try is another request, with the same key."""
        for name in ("request-id", "operation"):
            (self._folder / name).unlink(missing_ok=True)

    def forget(self) -> None:
        """The rig is gone; the next one is another."""
        self.forget_request()
        self.api_key_file.unlink(missing_ok=True)

    def _once(self, name: str, make: Callable[[], str]) -> str:
        file = self._folder / name
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        try:
            # Written before it is used: a process that is killed in between finds it again.
            handle = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        except FileExistsError:
            found = file.read_text()
            if found:
                return found
            # Killed between creating and writing.
            file.unlink()
            return self._once(name, make)
        with os.fdopen(handle, "w") as opened:
            value = make()
            opened.write(value)
            opened.flush()
            os.fsync(opened.fileno())
        return value
