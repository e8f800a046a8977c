"""The TPU API v2alpha1: its calls, each typed. Knows nothing of settings.

Flex-start is not in the official client library nor in v2. Creating carries a request id, so a second try creates nothing twice.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rig.google import GoogleError
from rig.states import Boot, Node, Operation, QueuedResource

if TYPE_CHECKING:
    from rig.google import Google
    from rig.plan import Plan

NAMESPACE = "rig/"


class TpuApi:
    """One account's view of the service. Every call may raise GoogleError and UnreachableError."""

    def __init__(self, google: Google) -> None:
        self._google = google

    def create(self, plan: Plan, request_id: str) -> Operation:
        """Ask for a queued resource. The same `request_id` again asks for the same one."""
        query = {"queuedResourceId": plan.queued_resource_id, "requestId": request_id}
        answer = self._call("POST", f"{plan.parent}/queuedResources", query, plan.body)
        return Operation.model_validate(answer)

    def get(self, name: str) -> QueuedResource:
        """A queued resource by its full name."""
        return QueuedResource.model_validate(self._call("GET", name))

    def list(self, parent: str) -> list[QueuedResource]:
        """Every queued resource of a zone, or with `locations/-` of all."""
        found = self._google.pages("tpu", f"v2alpha1/{parent}/queuedResources", "queuedResources")
        return [QueuedResource.model_validate(one) for one in found]

    def delete(self, name: str) -> Operation:
        """Delete a queued resource and its nodes."""
        return Operation.model_validate(self._call("DELETE", name, {"force": "true"}))

    def node(self, name: str) -> Node:
        """A node by its full name."""
        return Node.model_validate(self._call("GET", name))

    def boot(self, node: str) -> Boot:
        """What the node's startup script has published; empty before its first word."""
        body = {"queryPath": NAMESPACE, "workerIds": []}
        try:
            answer = self._call("POST", f"{node}:getGuestAttributes", body=body)
        except GoogleError as error:
            if error.is_not_found and "Guest Attribute" in error.message:
                return Boot()
            raise
        items = [
            item
            for worker in answer.get("guestAttributes", [])
            for item in worker.get("queryValue", {}).get("items", [])
        ]
        return Boot.model_validate({item["key"]: item["value"] for item in items})

    def operation(self, name: str) -> Operation:
        """A long-running operation."""
        return Operation.model_validate(self._call("GET", name))

    def accelerator_types(self, parent: str) -> set[str]:
        """What a zone has."""
        path = f"v2alpha1/{parent}/acceleratorTypes"
        return {str(one["type"]) for one in self._google.pages("tpu", path, "acceleratorTypes")}

    def _call(
        self,
        method: str,
        path: str,
        query: dict[str, str] | None = None,
        body: dict[str, Any] | None = None,
    ) -> dict[str, Any]:
        return self._google.call(method, "tpu", f"v2alpha1/{path}", query, body)
