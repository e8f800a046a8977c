"""Everything that a command works with: the settings, one account's connections, and the rig."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rig import tokens
from rig.api import TpuApi
from rig.google import Google
from rig.provision import POLL_SECONDS, Rig
from rig.records import Record
from rig.surroundings import Surroundings

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rig.settings import Settings


@dataclass(frozen=True)
class Session:
    """Of one command."""

    settings: Settings
    google: Google
    api: TpuApi
    surroundings: Surroundings
    rig: Rig


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
