"""What a VM needs around it: a way in for those who may call it, and the key that they must bring."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rig.network import Firewall
from rig.records import new_key
from rig.secret_manager import Secrets

if TYPE_CHECKING:
    from rig.google import Google
    from rig.records import Record
    from rig.settings import Settings


class Surroundings:
    """Of one rig. Every call may raise GoogleError, UnreachableError and NetworkError."""

    def __init__(self, google: Google, settings: Settings, record: Record) -> None:
        self._settings, self._record = settings, record
        self._firewall = Firewall(google, settings)
        self._secrets = Secrets(google, settings.project_id or "")

    def prepare(self) -> str | None:
        """Open the way in and have the key where the VM will look for it: in the answer, for its metadata, or in Secret Manager."""
        self._firewall.open()
        name = self._settings.api_key_secret
        if name is None:
            return self._record.api_key()
        if self._secrets.read(name) is None:
            self._secrets.write(name, new_key())
        return None

    def api_key(self) -> str | None:
        """What callers of the VM's server must send; None when this machine knows no key."""
        name = self._settings.api_key_secret
        return self._secrets.read(name) if name else self._record.known_api_key()

    def clear(self) -> None:
        """Close the way in."""
        self._firewall.close()
