"""Creating, watching and deleting the one VM: idempotent, inside the cost cap, and never touching what is not labelled ours."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from rig import capacity, cost
from rig.bundle import bundle, metadata
from rig.errors import RigError as RigError
from rig.errors import advice, ended, waiting
from rig.google import GoogleError, UnreachableError
from rig.plan import plan
from rig.states import Boot, State

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from rig.api import TpuApi
    from rig.bundle import Bundle
    from rig.cost import Cost
    from rig.records import Record
    from rig.settings import Settings
    from rig.states import Node, Operation, QueuedResource

# Guest attributes may be asked for ten times a minute and no more.
POLL_SECONDS = 15.0


NOTHING_YET = Boot()


@dataclass(frozen=True)
class Status:
    """Where the rig stands, from all that the service says."""

    resource: QueuedResource | None
    node: Node | None = None
    boot: Boot = NOTHING_YET
    operation: Operation | None = None
    """What creates it, where the service does not show it yet."""

    @property
    def phase(
        self,
    ) -> Literal["absent", "waiting", "booting", "serving", "failed", "ended", "deleting"]:
        """In one word."""
        if self.resource is None:
            return "waiting" if self.operation else "absent"
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

    def advice(self, settings: Settings) -> str | None:
        """What to do about it, where something is to be done."""
        resource = self.resource
        if resource is None:
            return None
        free = "It holds quota until `torchtpu-rig delete`."
        if resource.error:
            return " ".join(
                str(one) for one in (advice(resource.error.message, settings), free) if one
            )
        if resource.state is State.FAILED:
            return free
        if resource.state is State.SUSPENDED:
            return str(ended(resource, settings))
        if self.boot.failed:
            return (
                "The VM is up and costs: `torchtpu-rig ssh` looks, `torchtpu-rig delete` ends it."
            )
        found = waiting(resource, settings)
        return str(found) if found else None


class Rig:
    """The settings' VM."""

    def __init__(
        self,
        settings: Settings,
        api: TpuApi,
        record: Record,
        *,
        prepare: Callable[[], str | None],
        sleep: Callable[[float], object] = time.sleep,
        poll_seconds: float = POLL_SECONDS,
        pack: Callable[[], Bundle] = bundle,
    ) -> None:
        """`prepare` makes ready what stands around the VM, and gives the API key that travels in its metadata, if one does."""
        self.settings, self.record = settings, record
        self._api, self._prepare, self._pack = api, prepare, pack
        self._sleep, self._poll_seconds = sleep, poll_seconds

    @property
    def name(self) -> str:
        """Full name of the queued resource."""
        return f"{self.settings.parent}/queuedResources/{self.settings.queued_resource}"

    def create(self, price: Cost | None = None) -> QueuedResource | None:
        """Ask for the VM, unless it is there; None while the service has not shown it yet.

        Raises:
            CostError: by `price`, or where none is given by the table of prices, it could cost too much.
            RigError: something else has its name, or the service refuses.
        """
        cost.check(self.settings, found=price)
        found = self._find()
        if found is None:
            self._ask()
            return self._find()
        return self.adopt(found)

    def adopt(self, found: QueuedResource) -> QueuedResource:
        """Take what is there as the rig.

        Raises:
            RigError: it is not ours, or there is no VM in it any more.
        """
        if not found.is_ours:
            raise RigError(
                f"expected {self.settings.queued_resource} to be ours (label rig=gemma4-rust), found one that is not; "
                "set another QUEUED_RESOURCE"
            )
        if found.state.holds_quota_for_nothing:
            raise RigError(
                f"{found.short_name} is {found.state} and holds quota; `torchtpu-rig delete` frees it, then create again"
            )
        if found.state is State.DELETING:
            raise RigError(f"{found.short_name} is being deleted; create it again when it is gone")
        return found

    def differences(self, found: QueuedResource) -> list[str]:
        """In what a VM that is there differs from what the settings would create now; metadata only where the service shows it."""
        wanted = plan(self.settings, metadata(self.settings, None, self._pack()))
        now = _told_of(wanted.body)
        return [
            f"{field} is {then}, and would be {now.get(field)}"
            for field, then in _told_of(found.model_dump(by_alias=True)).items()
            if then != now.get(field)
        ]

    def _ask(self) -> None:
        key = self._prepare()
        wanted = plan(self.settings, metadata(self.settings, key, self._pack()))
        try:
            self.record.begun(self._api.create(wanted, self.record.request_id()).name)
        except GoogleError as error:
            if error.status == "ALREADY_EXISTS" and (found := self._find()) and found.is_ours:
                # Our own earlier request, whose answer was lost.
                return
            if error.code in {400, 403}:
                # Refused for good.
                self.record.forget_request()
            capacity.remember(self.settings, error.message)
            raise self._told(error) from error

    def delete(self) -> bool:
        """Delete the VM and its queued resource; false when there was none.

        Raises:
            RigError: it is not ours, or the service refuses.
        """
        found = self._find()
        if found is None:
            operation = self._creating()
            if operation and not operation.done:
                # Forgotten now, it would come up later and cost.
                raise RigError(
                    f"{self.settings.queued_resource} is being created and does not show yet; delete it in a minute"
                )
            self.record.forget()
            return False
        if not found.is_ours:
            raise RigError(
                f"expected to delete what is labelled rig=gemma4-rust, found {found.short_name} without that label; it is left alone"
            )
        if found.error:
            capacity.remember(self.settings, found.error.message)
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
        if found is None:
            operation = self._creating()
            if operation and not operation.done:
                return Status(None, operation=operation)
            # It may have come between the two questions.
            found = self._find() if operation else None
            if operation and found is None:
                # It came and went without us.
                self.record.forget_request()
        if found is None:
            return Status(None)
        if found.state is not State.ACTIVE or not found.nodes:
            return Status(found)
        try:
            node = self._api.node(found.nodes[0])
            return Status(found, node, self._api.boot(found.nodes[0]))
        except GoogleError as error:
            if error.is_not_found:
                # Going, or not there yet.
                return Status(found)
            raise self._told(error) from error

    def _creating(self) -> Operation | None:
        """The operation that is to bring the queued resource, if there is one that did not fail."""
        name = self.record.operation
        if name is None:
            return None
        try:
            found = self._api.operation(name)
        except GoogleError as error:
            if error.is_not_found:
                # So long ago that the service does not know it any more.
                self.record.forget_request()
                return None
            raise self._told(error) from error
        if found.error:
            self.record.forget_request()
            raise self._told(GoogleError(found.error.code, "REFUSED", found.error.message))
        return found

    def watch(self, timeout_seconds: float) -> Iterator[Status]:
        """The status now and whenever it changed, until it is settled or the time is over.

        Raises:
            RigError: the service refuses.
        """
        last, waited = None, 0.0
        while True:
            now = self._seen(last_chance=waited >= timeout_seconds)
            if now and now != last:
                yield now
            last = now or last
            if waited >= timeout_seconds or (now and now.is_settled):
                return
            self._sleep(self._poll_seconds)
            waited += self._poll_seconds

    def _seen(self, *, last_chance: bool) -> Status | None:
        try:
            return self.status()
        except UnreachableError:
            # A laptop that slept or changed its network finds the service again.
            if last_chance:
                raise
            return None

    def holding_quota(self) -> list[QueuedResource]:
        """Ours in any zone that have no VM and count against the quota until they are deleted.

        Raises:
            RigError: the service refuses.
        """
        return [one for one in self._all() if one.state.holds_quota_for_nothing]

    def siblings(self) -> list[QueuedResource]:
        """Ours in any zone that are not on their way out, this one aside.

        Raises:
            RigError: the service refuses.
        """
        found = [one for one in self._all() if one.state is not State.DELETING]
        return [one for one in found if one.name != self.name]

    def _all(self) -> list[QueuedResource]:
        try:
            found = self._api.list(f"projects/{self.settings.project_id}/locations/-")
        except GoogleError as error:
            raise self._told(error) from error
        return [one for one in found if one.is_ours]

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


def _told_of(body: Mapping[str, Any]) -> dict[str, str]:
    """What of a queued resource decides what its VM is and serves."""
    node = body["tpu"]["nodeSpec"][0]["node"]
    sent = node.get("metadata", {})
    found = {
        "acceleratorType": node.get("acceleratorType"),
        "runtimeVersion": node.get("runtimeVersion"),
        "provisioningModel": body.get("provisioningModel"),
        "sources": sent.get("bundle-sha256"),
    }
    settings = dict(line.split("=", 1) for line in sent.get("settings", "").splitlines())
    return {field: value for field, value in found.items() if value} | settings
