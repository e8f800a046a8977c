"""Everything that a command works with: the settings, one account's connections, and the rig."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rig import prices, tokens
from rig.api import TpuApi
from rig.bundle import BundleError
from rig.cost import CostError
from rig.errors import RigError
from rig.google import Google, GoogleError, UnreachableError
from rig.provision import POLL_SECONDS, Rig
from rig.records import Record
from rig.surroundings import Surroundings

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rig.cost import Cost
    from rig.settings import Settings

FAULTS = (RigError, GoogleError, UnreachableError, tokens.TokenError, CostError, BundleError)
"""What a session may raise that a person can do something about; wrong settings aside."""


@dataclass(frozen=True)
class Session:
    """Of one command."""

    settings: Settings
    google: Google
    api: TpuApi
    surroundings: Surroundings
    rig: Rig

    def delete(self) -> bool:
        """Delete the VM and, with the project's last one, the way in; false when there was none.

        Raises:
            RigError: it is not ours, or the service refuses.
        """
        existed = self.rig.delete()
        if not self.rig.siblings():
            self.surroundings.clear()
        return existed

    def price(self) -> Cost | None:
        """What an hour costs, for those who go on without knowing it."""
        try:
            return prices.current(self.google, self.settings)
        except CostError:
            return None


@contextlib.contextmanager
def opened(settings: Settings, poll_seconds: float = POLL_SECONDS) -> Iterator[Session]:
    """A session with whoever is signed in.

    Raises:
        TokenError: nobody is.
    """
    with Google(tokens.found()) as google:
        api, record = TpuApi(google), Record(settings)
        surroundings = Surroundings(google, settings, record)
        rig = Rig(settings, api, record, prepare=surroundings.prepare, poll_seconds=poll_seconds)
        yield Session(settings, google, api, surroundings, rig)
