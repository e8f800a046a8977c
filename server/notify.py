"""Tells systemd how the service does: loading, ready, alive, stopping (sd_notify(3)). Without systemd it says nothing.

Any thread may call; a message is one datagram.
"""

from __future__ import annotations

import logging
import os
import socket
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

    from server.worker import Progress

logger = logging.getLogger(__name__)

# How much longer systemd is asked to wait at each sign of progress: a program of the largest model compiles for less.
LOADING_SECONDS = 600


class Notifier:
    """One process's line to its service manager."""

    def __init__(self, environment: Mapping[str, str] = os.environ) -> None:
        self._address = environment.get("NOTIFY_SOCKET", "")
        if self._address.startswith("@"):
            # An address without a file.
            self._address = "\0" + self._address[1:]
        self.alive_every = _watchdog_seconds(environment) / 3 if self._address else 0.0
        """Seconds between two signs of life that are wanted; 0 when none are."""
        self._last_alive = 0.0

    def progress(self, progress: Progress) -> None:
        """Loading came to `progress`, or ended."""
        match progress.phase:
            case "ready":
                self.say("READY=1", "STATUS=serving")
            case "failed":
                self.say("STATUS=loading failed")
            case "stopped":
                pass
            case phase:
                self.say(
                    f"STATUS={phase}: {progress.fraction:.0%}",
                    f"EXTEND_TIMEOUT_USEC={LOADING_SECONDS * 1_000_000}",
                )

    def alive(self) -> None:
        """The engine's thread goes on; tells systemd as often as it wants to know."""
        now = time.monotonic()
        if self.alive_every and now - self._last_alive >= self.alive_every:
            self._last_alive = now
            self.say("WATCHDOG=1")

    def stopping(self) -> None:
        """No new requests from now on."""
        self.say("STOPPING=1", "STATUS=finishing running requests")

    def say(self, *lines: str) -> None:
        """Anything in sd_notify's words; one datagram."""
        if not self._address:
            return
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as line:
                line.sendto("\n".join(lines).encode(), self._address)
        except OSError as error:
            # The service manager is gone or will not listen; serving goes on.
            logger.warning("cannot reach systemd at NOTIFY_SOCKET: %s", error)


def _watchdog_seconds(environment: Mapping[str, str]) -> float:
    """After which systemd takes silence for a hang; 0 without a watchdog for this process."""
    wanted, pid = environment.get("WATCHDOG_USEC", ""), environment.get("WATCHDOG_PID", "")
    if not wanted.isdigit() or pid not in ("", str(os.getpid())):
        return 0.0
    return int(wanted) / 1e6
