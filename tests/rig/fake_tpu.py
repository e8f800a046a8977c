"""Google's TPU API and a VM's metadata server on loopback: the one thing that cannot be had here, speaking its real protocol.

One state, two doors, and behind the first of them also the project's other services (fake_project.py). What a startup
script writes at the metadata door is what `:getGuestAttributes` answers at the other.
"""

from __future__ import annotations

import json
import threading
import uuid
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qsl, unquote, urlsplit

from tests.rig.fake_http import (
    Call,
    Door,
    Handler,
    RefusedError,
    Request,
    check_answer,
    not_found,
    understood,
)
from tests.rig.fake_project import METHODS as PROJECT_METHODS
from tests.rig.fake_project import FakeProject

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["Call", "Door", "FakeTpu", "RefusedError", "metadata_door", "rest_door", "services"]

ON_THE_WAY = ("WAITING_FOR_RESOURCES", "PROVISIONING", "ACTIVE")
FLEX_START_ZONES = {"us-west4-a"}
MAX_VALUE, MAX_ALL = 262_144, 524_288
SERVICES = (
    "tpu",
    "compute",
    "secretmanager",
    "cloudbilling",
    "serviceusage",
    "cloudresourcemanager",
)


def services(door: Door) -> dict[str, str]:
    """The environment in which every service of Google's is behind `door`, and who tells this machine's address too."""
    found = {f"{name.upper()}_API_ENDPOINT": f"http://{door.address}" for name in SERVICES}
    return {**found, "IPIFY_API_ENDPOINT": f"http://{door.address}/ipify"}


@dataclass
class FakeTpu:
    """What the service knows. Tests move it along with `tick`, and put answers into `next_answers`."""

    resources: dict[str, dict[str, Any]] = field(default_factory=dict)
    nodes: dict[str, dict[str, Any]] = field(default_factory=dict)
    attributes: dict[str, dict[str, str]] = field(default_factory=dict)
    operations: dict[str, dict[str, Any]] = field(default_factory=dict)
    requests: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Operations by the id of the request that made them."""
    next_answers: list[RefusedError | None] = field(default_factory=list)
    """Taken one by one by the next calls; None lets one through."""
    lost_answers: int = 0
    """So many creations are done and not answered."""
    good_tokens: set[str] | None = None
    calls: list[Call] = field(default_factory=list)
    zones: dict[str, set[str]] = field(
        default_factory=lambda: {
            "us-west4-a": {"v5litepod-1", "v5litepod-4", "v5litepod-8"},
            "us-east1-c": {"v5litepod-1", "v5litepod-4"},
            "europe-west4-b": {"v5litepod-1", "v5litepod-4"},
            "us-central2-b": {"v4-8"},
        }
    )
    """What each has."""
    versions: set[str] = field(
        default_factory=lambda: {"v2-alpha-tpuv5-lite", "v2-alpha-tpuv5", "tpu-vm-base"}
    )
    operations_take_time: bool = True
    """Until `tick`; else they are done at once."""
    vm_has_account: bool = True
    callers_address: object = "203.0.113.7"
    project: FakeProject = field(default_factory=FakeProject)

    # -- what the service does -----------------------------------------------------------------------

    def create(self, parent: str, query: dict[str, str], body: dict[str, Any]) -> dict[str, Any]:
        request_id = query.get("requestId", "")
        if request_id in self.requests:
            return self.requests[request_id]
        name = f"{parent}/queuedResources/{query['queuedResourceId']}"
        if name in self.resources:
            raise RefusedError(409, "ALREADY_EXISTS", f"Resource '{name}' already exists")
        node = body["tpu"]["nodeSpec"][0]["node"]
        sizes = {key: len(value.encode()) for key, value in node.get("metadata", {}).items()}
        if any(size > MAX_VALUE for size in sizes.values()) or sum(sizes.values()) > MAX_ALL:
            raise RefusedError(400, "INVALID_ARGUMENT", "Metadata value exceeds the maximum.")
        zone = parent.rsplit("/", 1)[1]
        if body.get("provisioningModel") == "FLEX_START":
            if zone not in FLEX_START_ZONES:
                message = (
                    "FLEX_START provisioning model is not supported for accelerator type "
                    f'"{node["acceleratorType"]}" in location "{zone}"'
                )
                raise RefusedError(400, "INVALID_ARGUMENT", message)
            if "maxRunDuration" not in body.get("runDuration", {}):
                raise RefusedError(400, "INVALID_ARGUMENT", "max_run_duration is required")
        self.resources[name] = {**body, "name": name, "state": {"state": "CREATING"}}
        made = self.operation(name)
        if request_id:
            self.requests[request_id] = made
        return made

    def delete(self, name: str, query: dict[str, str]) -> dict[str, Any]:
        if name not in self.resources:
            raise not_found(name)
        state = self.resources[name]["state"]["state"]
        if state in {"ACTIVE", "PROVISIONING"} and query.get("force", "").lower() != "true":
            message = "Queued resource must be in FAILED or SUSPENDED state, or force must be set, to be deleted."
            raise RefusedError(400, "FAILED_PRECONDITION", message)
        del self.resources[name]
        self.drop_nodes(name)
        return self.operation(name)

    def operation(self, target: str) -> dict[str, Any]:
        name = f"{target.rsplit('/', 2)[0]}/operations/operation-{uuid.uuid4().hex[:8]}"
        done: dict[str, Any] = {"done": False}
        if not self.operations_take_time:
            done = {"done": True, "response": self.resources.get(target, {})}
        self.operations[name] = {"name": name, "metadata": {"target": target}, **done}
        return self.operations[name]

    def types(self, zone: str) -> list[dict[str, Any]]:
        parent, zone = zone.rsplit("/", 1)
        if zone not in self.zones:
            message = f"Location {zone} is not found or access is unauthorized."
            raise RefusedError(403, "PERMISSION_DENIED", message)
        return [
            {"name": f"{parent}/{zone}/acceleratorTypes/{one}", "type": one}
            for one in sorted(self.zones[zone])
        ]

    def runtime_versions(self, zone: str) -> list[dict[str, Any]]:
        return [
            {"name": f"{zone}/runtimeVersions/{one}", "version": one}
            for one in sorted(self.versions)
        ]

    def guest_attributes(self, node: str, query: str) -> dict[str, Any]:
        if node not in self.nodes:
            raise not_found(node)
        namespace = query.strip("/")
        found = self.attributes.get(node, {})
        items = [
            {"namespace": namespace, "key": key.split("/", 1)[1], "value": value}
            for key, value in sorted(found.items())
            if key.startswith(f"{namespace}/")
        ]
        if not items:
            message = f"The resource '{query}' of type 'Guest Attribute' was not found."
            raise RefusedError(404, "NOT_FOUND", message)
        return {"guestAttributes": [{"queryPath": query, "queryValue": {"items": items}}]}

    # -- what time does ------------------------------------------------------------------------------

    def tick(
        self,
        to: str | None = None,
        code: int = 8,
        message: str = "There is no more capacity in the zone",
    ) -> None:
        """Every resource goes one state on, or to `to`."""
        for name, resource in self.resources.items():
            state = resource["state"]["state"]
            steps = ("CREATING", *ON_THE_WAY)
            following = to or steps[min(steps.index(state) + 1, len(steps) - 1)]
            resource["state"] = {"state": following, "stateInitiator": "SERVICE"}
            if following == "FAILED":
                resource["state"]["failedData"] = {"error": {"code": code, "message": message}}
            if following == "ACTIVE":
                self.add_nodes(name)
            if following in {"FAILED", "SUSPENDED"}:
                self.drop_nodes(name)
        for operation in self.operations.values():
            operation["done"] = True

    def add_nodes(self, name: str) -> None:
        for spec in self.resources[name]["tpu"]["nodeSpec"]:
            node = f"{spec['parent']}/nodes/{spec['nodeId']}"
            endpoint = {"ipAddress": "10.182.0.2", "accessConfig": {"externalIp": "127.0.0.1"}}
            self.nodes.setdefault(
                node,
                {
                    **spec["node"],
                    "name": node,
                    "state": "READY",
                    "health": "HEALTHY",
                    "queuedResource": name,
                    "networkEndpoints": [endpoint],
                    "schedulingConfig": {"terminationTimestamp": "2026-12-01T08:00:00Z"},
                },
            )

    def drop_nodes(self, name: str) -> None:
        for node in [key for key, value in self.nodes.items() if value["queuedResource"] == name]:
            del self.nodes[node]
            self.attributes.pop(node, None)

    def vm_token(self) -> dict[str, Any]:
        """Another one each time, which the services know."""
        token = f"vm-{uuid.uuid4().hex}"
        if self.good_tokens is not None:
            self.good_tokens.add(token)
        return {"access_token": token, "expires_in": 3599, "token_type": "Bearer"}

    def publish(self, node: str, **attributes: str) -> None:
        """As the VM's startup script does."""
        self.attributes.setdefault(node, {}).update(
            {f"rig/{key}": value for key, value in attributes.items()}
        )


def _listed(parent: str, things: dict[str, dict[str, Any]]) -> list[dict[str, Any]]:
    start = parent.removesuffix("-")
    return [value for name, value in things.items() if name.startswith(start)]


def _get(things: dict[str, dict[str, Any]], name: str) -> dict[str, Any]:
    if name not in things:
        raise not_found(name)
    return things[name]


LOCATIONS = "tpu.projects.locations"
METHODS: dict[str, Callable[[FakeTpu, Request], dict[str, Any]]] = {
    f"{LOCATIONS}.list": lambda t, r: {
        "locations": [
            {"name": f"{r.name}/locations/{zone}", "locationId": zone} for zone in sorted(t.zones)
        ]
    },
    f"{LOCATIONS}.acceleratorTypes.list": lambda t, r: {"acceleratorTypes": t.types(r.name)},
    f"{LOCATIONS}.runtimeVersions.list": lambda t, r: {
        "runtimeVersions": t.runtime_versions(r.name)
    },
    f"{LOCATIONS}.queuedResources.create": lambda t, r: t.create(r.name, r.query, r.body),
    f"{LOCATIONS}.queuedResources.list": lambda t, r: {
        "queuedResources": _listed(r.name, t.resources)
    },
    f"{LOCATIONS}.queuedResources.get": lambda t, r: _get(t.resources, r.name),
    f"{LOCATIONS}.queuedResources.delete": lambda t, r: t.delete(r.name, r.query),
    f"{LOCATIONS}.nodes.get": lambda t, r: _get(t.nodes, r.name),
    f"{LOCATIONS}.nodes.list": lambda t, r: {"nodes": _listed(r.name, t.nodes)},
    f"{LOCATIONS}.nodes.getGuestAttributes": lambda t, r: t.guest_attributes(
        r.name, r.body.get("queryPath", "")
    ),
    f"{LOCATIONS}.operations.get": lambda t, r: _get(t.operations, r.name),
}


def rest_door(tpu: FakeTpu) -> Door:
    """tpu.googleapis.com, and every other service that the rig asks."""
    lock = threading.Lock()

    def answer_to(call: Call) -> dict[str, Any]:
        if tpu.good_tokens is not None and call.token not in tpu.good_tokens:
            message = "Request had invalid authentication credentials."
            raise RefusedError(401, "UNAUTHENTICATED", message)
        refused = tpu.next_answers.pop(0) if tpu.next_answers else None
        if refused:
            raise refused
        request = understood(call)
        if request.method in PROJECT_METHODS:
            result = PROJECT_METHODS[request.method](tpu.project, request)
        elif request.method in METHODS:
            tpu.project.refuse_if_disabled("tpu.googleapis.com", call.token)
            result = METHODS[request.method](tpu, request)
        else:
            raise RefusedError(501, "UNIMPLEMENTED", f"the fake has no {request.method}")
        check_answer(request, result)
        return result

    class Rest(Handler):
        def any_method(self) -> None:
            url = urlsplit(self.path)
            raw = self.body()
            if url.path == "/ipify":
                self.answer_json(200, {"ip": tpu.callers_address})
                return
            token = (self.headers.get("Authorization") or "").removeprefix("Bearer ") or None
            query = dict(parse_qsl(url.query))
            body = json.loads(raw) if raw else {}
            call = Call(self.command, unquote(url.path), query, token, body)
            with lock:
                tpu.calls.append(call)
                try:
                    code, out = 200, answer_to(call)
                except RefusedError as refused:
                    code, out = refused.code, refused.body
            if call.method == "POST" and code == 200 and tpu.lost_answers:
                tpu.lost_answers -= 1
                self.close_connection = True
                return
            self.answer_json(code, out)

        do_GET = do_POST = do_PUT = do_PATCH = do_DELETE = any_method  # noqa: N815

    return Door(Rest)


def metadata_door(tpu: FakeTpu, node: str, values: dict[str, str]) -> Door:
    """metadata.google.internal as `node` sees it; `values` are its metadata."""
    base = "/computeMetadata/v1/instance/"

    class Metadata(Handler):
        def any_method(self) -> None:
            body = self.body().decode()
            if self.headers.get("Metadata-Flavor") != "Google":
                self.answer(403, b"Missing Metadata-Flavor:Google header.", "text/plain")
                return
            path = urlsplit(self.path).path.removeprefix(base)
            kind, _, key = path.partition("/")
            if kind == "guest-attributes" and self.command == "PUT":
                tpu.attributes.setdefault(node, {})[key] = body
                self.answer(200, b"", "text/plain")
            elif kind == "attributes" and key in values:
                self.answer(200, values[key].encode(), "text/plain")
            elif path == "service-accounts/default/token" and tpu.vm_has_account:
                self.answer_json(200, tpu.vm_token())
            else:
                self.answer(404, b"", "text/plain")

        do_GET = do_PUT = any_method  # noqa: N815

    return Door(Metadata)
