"""Creating, watching and deleting the one VM: idempotent, inside the cost cap, and never touching what is not labelled ours."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from rig import cost
from rig.bundle import bundle, metadata
from rig.errors import advice
from rig.google import GoogleError
from rig.plan import plan
from rig.states import Boot, State

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from rig.api import TpuApi
    from rig.bundle import Bundle
    from rig.records import Record
    from rig.settings import Settings
    from rig.states import Node, QueuedResource

# Guest attributes may be asked for ten times a minute and no more.
POLL_SECONDS = 15.0


class RigError(RuntimeError):
    """What was asked for cannot be; the text says why and what to do."""


@dataclass(frozen=True)
class Status:
    """Where the rig stands, from all that the service says."""

    resource: QueuedResource | None
    node: Node | None
    boot: Boot

    @property
    def phase(
        self,
    ) -> Literal["absent", "waiting", "booting", "serving", "failed", "ended", "deleting"]:
        """In one word."""
        if self.resource is None:
            return "absent"
        state = self.resource.state
        if state is State.DELETING:
            return "deleting"
        if state is State.FAILED or self.boot.failed:
            return "failed"
        if state in {State.SUSPENDING, State.SUSPENDED}:
            return "ended"
        if state.is_waiting:
            return "waiting"
        return "serving" if self.boot.is_done else "booting"

    @property
    def is_settled(self) -> bool:
        """Waiting longer changes nothing."""
        return self.phase in {"absent", "serving", "failed", "ended"}


class Rig:
    """The settings' VM."""

    def __init__(
        self,
        settings: Settings,
        api: TpuApi,
        record: Record,
        *,
        sleep: Callable[[float], object] = time.sleep,
        pack: Callable[[], Bundle] = bundle,
    ) -> None:
        self.settings, self.record = settings, record
        self._api, self._sleep, self._pack = api, sleep, pack

    @property
    def name(self) -> str:
        """Full name of the queued resource."""
        return f"{self.settings.parent}/queuedResources/{self.settings.queued_resource}"

    def create(self) -> QueuedResource | None:
        """Ask for the VM, unless it is there; None while the service has not shown it yet.

        Raises:
            CostError: it could cost too much.
            RigError: something else has its name, or the service refuses.
        """
        cost.check(self.settings)
        found = self._find()
        if found is None:
            self._ask()
            return self._find()
        if not found.is_ours:
            raise RigError(
                f"expected {self.settings.queued_resource} to be ours (label rig=gemma4-rust), found one that is not; "
                "set another QUEUED_RESOURCE"
            )
        if found.state.holds_quota_for_nothing:
            raise RigError(
                f"{found.short_name} is {found.state} and holds quota; `torchtpu-rig delete` frees it, then create again"
            )
        return found

    def _ask(self) -> None:
        key = None if self.settings.api_key_secret else self.record.api_key()
        wanted = plan(self.settings, metadata(self.settings, key, self._pack()))
        try:
            self._api.create(wanted, self.record.request_id())
        except GoogleError as error:
            if error.status == "ALREADY_EXISTS" and (found := self._find()) and found.is_ours:
                # Our own earlier request, whose answer was lost.
                return
            if error.code in {400, 403}:
                # Refused for good: the next try is another request.
                self.record.forget()
            raise self._told(error) from error

    def delete(self) -> bool:
        """Delete the VM and its queued resource; false when there was none.

        Raises:
            RigError: it is not ours, or the service refuses.
        """
        found = self._find()
        if found is None:
            self.record.forget()
            return False
        if not found.is_ours:
            raise RigError(
                f"expected to delete what is labelled rig=gemma4-rust, found {found.short_name} without that label; it is left alone"
            )
        try:
            self._api.delete(found.name)
        except GoogleError as error:
            if not error.is_not_found:
                raise self._told(error) from error
        self.record.forget()
        return True

    def status(self) -> Status:
        """Everything that the service says now.

        Raises:
            RigError: the service refuses.
        """
        found = self._find()
        if found is None or found.state is not State.ACTIVE or not found.nodes:
            return Status(found, None, Boot())
        try:
            node = self._api.node(found.nodes[0])
            return Status(found, node, self._api.boot(found.nodes[0]))
        except GoogleError as error:
            if error.is_not_found:
                # Going, or not there yet.
                return Status(found, None, Boot())
            raise self._told(error) from error

    def watch(self, timeout_seconds: float) -> Iterator[Status]:
        """The status now and whenever it changed, until it is settled or the time is over.

        Raises:
            RigError: the service refuses.
        """
        last, waited = None, 0.0
        while True:
            now = self.status()
            if now != last:
                yield now
            last = now
            if now.is_settled or waited >= timeout_seconds:
                return
            self._sleep(POLL_SECONDS)
            waited += POLL_SECONDS

    def holding_quota(self) -> list[QueuedResource]:
        """Ours in any zone that have no VM and count against the quota until they are deleted."""
        everywhere = f"projects/{self.settings.project_id}/locations/-"
        found = self._api.list(everywhere)
        return [one for one in found if one.is_ours and one.state.holds_quota_for_nothing]

    def _find(self) -> QueuedResource | None:
        try:
            return self._api.get(self.name)
        except GoogleError as error:
            if error.is_not_found:
                return None
            raise self._told(error) from error

    def _told(self, error: GoogleError) -> RigError:
        known = advice(str(error), self.settings)
        return RigError(f"{known} ({error})" if known else str(error))
