"""On the VM: deletes it when nobody has asked it anything for IDLE_MINUTES, and after MAX_RUN_DURATION where the service does not.

Says so in the guest attribute rig/keeper some minutes before, and what is wrong when it may not delete. Knows the server by
its metrics only. What is deleted is the queued resource, so that nothing is left that holds quota.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import logging
import os
import time
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING

import httpx
from prometheus_client.parser import text_string_to_metric_families

from rig.api import TpuApi
from rig.google import Google, GoogleError, UnreachableError
from rig.settings import read
from rig.states import State
from rig.tokens import MetadataTokens, TokenError, metadata_host

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from rig.settings import Settings

logger = logging.getLogger(__name__)

POLL_SECONDS = 30.0
# Between two tries to delete: a refusal may pass, and an accepted deletion takes minutes.
AGAIN_SECONDS = 300.0
WARNING_SECONDS = 300.0
# A boot takes minutes; a server that never answered within an hour is one that failed.
BOOT_SECONDS = 3600.0
SERVER_SECONDS, PUBLISH_SECONDS = 10.0, 5.0
NOTHING = "asked again, nothing is due"
ROLE = "roles/tpu.admin"
"""What the VM's account needs to delete its own queued resource."""


class ServerError(RuntimeError):
    """The server answers, and does not say what it does."""


@dataclass(frozen=True)
class Load:
    """What the server has done and does."""

    served: float
    """Requests since it started."""
    is_busy: bool
    """It has one now, or one waits."""


def load(url: str, api_key: str | None) -> Load | None:
    """What the server's metrics say; None when it does not answer.

    Raises:
        ServerError: it answers with something else.
    """
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    try:
        answer = httpx.get(
            f"{url}/metrics", headers=headers, timeout=SERVER_SECONDS, trust_env=False
        )
    except httpx.TransportError:
        return None
    if answer.status_code != httpx.codes.OK:
        raise ServerError(f"expected metrics from the server, found HTTP {answer.status_code}")
    totals: dict[str, float] = {}
    for family in text_string_to_metric_families(answer.text):
        for sample in family.samples:
            totals[sample.name] = totals.get(sample.name, 0.0) + sample.value
    try:
        return Load(
            served=totals["torchtpu_requests_total"],
            is_busy=totals["torchtpu_requests_running"] + totals["torchtpu_requests_waiting"] > 0,
        )
    except KeyError as error:
        raise ServerError(f"expected {error} in the server's metrics, found none") from error


def publish(text: str) -> None:
    """Write the guest attribute; a metadata server that does not take it is logged."""
    url = f"http://{metadata_host()}/computeMetadata/v1/instance/guest-attributes/rig/keeper"
    headers = {"Metadata-Flavor": "Google"}
    try:
        httpx.put(
            url, content=text, headers=headers, timeout=PUBLISH_SECONDS, trust_env=False
        ).raise_for_status()
    except httpx.HTTPError as error:
        logger.warning("expected the metadata server to take %r, found %r", text, error)


class Age:
    """Seconds that this VM has run, those before a reboot too. The time of day, which may be set, is not asked."""

    def __init__(self, folder: Path, proc: Path = Path("/proc")) -> None:
        self._file, self._proc = folder / "keeper.json", proc
        self._boot = (proc / "sys/kernel/random/boot_id").read_text().strip()
        self._before = 0.0
        # Without a readable file the age is at least this boot's.
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            known = json.loads(self._file.read_text())
            self._before = float(known["before"])
            if known["boot"] != self._boot:
                self._before += float(known["uptime"])

    def seconds(self) -> float:
        """Now; written down for the next boot."""
        uptime = float((self._proc / "uptime").read_text().split()[0])
        known = {"boot": self._boot, "before": self._before, "uptime": uptime}
        new = self._file.with_suffix(".new")
        try:
            new.write_text(json.dumps(known))
            new.replace(self._file)
        except OSError as error:
            # A full disk keeps no VM alive.
            logger.warning("expected to write %s, found %r", self._file, error)
        return self._before + uptime


class Keeper:
    """Of one VM; `look`, `age`, `clock` and `sleep` are what it sees of the world."""

    def __init__(
        self,
        settings: Settings,
        api: TpuApi,
        *,
        look: Callable[[], Load | None],
        age: Callable[[], float],
        publish: Callable[[str], None] = publish,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], object] = time.sleep,
        today: Callable[[], datetime] = lambda: datetime.now(UTC),
    ) -> None:
        self._settings, self._api = settings, api
        self._look, self._age, self._publish = look, age, publish
        self._clock, self._sleep, self._today = clock, sleep, today
        self._name = f"{settings.parent}/queuedResources/{settings.queued_resource}"
        self._begun = self._active = clock()
        self._last: Load | None = None
        self._said, self._trouble = "", ""
        self._next_try = float("-inf")

    def run(self) -> None:
        """Until the queued resource is gone."""
        while not self.tick():
            self._sleep(POLL_SECONDS)

    def tick(self) -> bool:
        """Look once, and do what is due; true when the queued resource is gone."""
        problem = self._seen()
        text, seconds_left = min(
            (due for due in (self._idle(), self._too_long()) if due),
            key=lambda due: due[1],
            default=("", float("inf")),
        )
        if seconds_left <= 0:
            return self._deleted(text)
        self._trouble = ""
        if seconds_left <= self._warning:
            end = self._today() + timedelta(seconds=seconds_left)
            unless = " unless asked" if text.startswith("idle") else ""
            self._say(f"{text}: deleted at {end:%H:%M} UTC{unless}")
        else:
            self._say(problem)
        return False

    @property
    def _warning(self) -> float:
        idle = self._settings.idle_minutes * 60.0
        return min(WARNING_SECONDS, idle / 2) if idle else WARNING_SECONDS

    def _seen(self) -> str:
        """Looks at the server; what is wrong with it."""
        try:
            now = self._look()
        except ServerError as error:
            # It lives, and may be at work: never deleted on a guess.
            self._active = self._clock()
            return f"idle time is not counted: {error}"
        if now is None:
            # Down counts as idle once it was up, or when it had its hour.
            if self._last is None and self._clock() - self._begun < BOOT_SECONDS:
                return ""
            return "the server does not answer"
        if self._last is None or now.is_busy or now.served > self._last.served:
            self._active = self._clock()
        self._last = now
        return ""

    def _idle(self) -> tuple[str, float] | None:
        limit = self._settings.idle_minutes * 60.0
        now = self._clock()
        is_booting = self._last is None and now - self._begun < BOOT_SECONDS
        if not limit or is_booting:
            return None
        idle = now - self._active
        return f"idle {idle // 60:.0f} of {limit / 60:.0f} min", limit - idle

    def _too_long(self) -> tuple[str, float] | None:
        if self._settings.provisioning_model == "flex-start":
            # The service ends it.
            return None
        limit, age = self._settings.max_run_duration.total_seconds(), self._age()
        return f"ran {age / 3600:.1f} of {limit / 3600:g} h", limit - age

    def _deleted(self, why: str) -> bool:
        if self._clock() < self._next_try:
            self._say(self._trouble)
            return False
        self._next_try = self._clock() + AGAIN_SECONDS
        # Said before: afterwards there may be no VM to say it.
        self._say(f"{why}: being deleted")
        try:
            found = self._api.get(self._name)
            if not found.is_ours:
                self._trouble = (
                    f"{why}, and not deleted: {found.short_name} is not labelled rig=gemma4-rust"
                )
            else:
                if found.state is not State.DELETING:
                    self._api.delete(self._name)
                self._trouble = f"{why}: being deleted"
        except GoogleError as error:
            if error.is_not_found:
                return True
            self._trouble = f"{why}, and not deleted: {self._refusal(error)}"
        except (UnreachableError, TokenError) as error:
            self._trouble = f"{why}, and not deleted: {error}"
        self._say(self._trouble)
        return False

    def _refusal(self, error: GoogleError) -> str:
        if error.code != httpx.codes.FORBIDDEN:
            return str(error)
        return (
            f"the VM's service account needs {ROLE} in {self._settings.project_id}; "
            f"`torchtpu-rig delete` deletes it meanwhile ({error})"
        )

    def _say(self, text: str) -> None:
        if text != self._said:
            # Ten queries a minute are allowed: only what changed.
            self._publish(text or NOTHING)
            logger.info("%s", text or NOTHING)
            self._said = text


def is_needed(settings: Settings) -> bool:
    """The VM has something to be kept for."""
    return settings.idle_minutes > 0 or settings.provisioning_model != "flex-start"


def _api_key() -> str | None:
    """The server's, where systemd put it."""
    folder = os.environ.get("CREDENTIALS_DIRECTORY")
    file = Path(folder) / "api-key" if folder else None
    return file.read_text().strip() or None if file and file.is_file() else None


def main(arguments: Sequence[str] | None = None) -> None:
    """`python -m rig.keeper --settings FILE`: runs for as long as the VM does, or ends at once when there is nothing to keep."""
    parser = argparse.ArgumentParser(prog="python -m rig.keeper", description=__doc__)
    parser.add_argument("--settings", type=Path, required=True, help="tpu.env as the VM has it")
    settings = read(parser.parse_args(arguments).settings)
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    logging.getLogger("httpx").setLevel(logging.WARNING)
    if not is_needed(settings):
        logger.info("nothing to keep: IDLE_MINUTES=0, and flex-start ends by itself")
        return
    state = Path(os.environ.get("RIG_STATE", "/var/lib/torchtpu-rs"))
    url, key = f"http://127.0.0.1:{settings.serve_port}", _api_key()
    with Google(MetadataTokens()) as google:
        Keeper(settings, TpuApi(google), look=lambda: load(url, key), age=Age(state).seconds).run()


if __name__ == "__main__":
    main()
