"""Google's TPU API and a VM's metadata server on loopback: the one thing that cannot be had here, speaking its real protocol.

One state, two doors. Bodies are checked against Google's own discovery document, so that a field which the API version
does not have is refused as the service refuses it. What a startup script writes at the metadata door is what
`:getGuestAttributes` answers at the other.
"""

from __future__ import annotations

import functools
import json
import re
import threading
import uuid
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib import resources
from typing import Any, Self
from urllib.parse import parse_qsl, unquote, urlsplit

ON_THE_WAY = ("WAITING_FOR_RESOURCES", "PROVISIONING", "ACTIVE")
FLEX_START_ZONES = {"us-west4-a"}
MAX_VALUE, MAX_ALL = 262_144, 524_288


class RefusedError(Exception):
    """An answer other than 200."""

    def __init__(self, code: int, status: str, message: str) -> None:
        super().__init__(message)
        self.code, self.status, self.message = code, status, message


def not_found(name: str) -> RefusedError:
    return RefusedError(404, "NOT_FOUND", f"Resource '{name}' was not found")


@functools.cache
def schemas() -> dict[str, Any]:
    """Of API version v2alpha1."""
    document = resources.files("googleapiclient.discovery_cache.documents") / "tpu.v2alpha1.json"
    found: dict[str, Any] = json.loads(document.read_text())["schemas"]
    return found


def check(schema: str, body: dict[str, Any], path: str) -> None:
    """Refuses fields and values that the schema does not have."""
    known = schemas()[schema].get("properties", {})
    for key, value in body.items():
        if key not in known:
            message = f"Invalid JSON payload received. Unknown name \"{key}\" at '{path}': Cannot find field."
            raise RefusedError(400, "INVALID_ARGUMENT", message)
        wanted = known[key]
        if "enum" in wanted and value not in wanted["enum"]:
            raise RefusedError(
                400, "INVALID_ARGUMENT", f"Invalid value at '{path}.{key}' ({value!r})"
            )
        if "$ref" in wanted:
            check(wanted["$ref"], value, f"{path}.{key}")
        elif "$ref" in wanted.get("items", {}):
            for index, one in enumerate(value):
                check(wanted["items"]["$ref"], one, f"{path}.{key}[{index}]")


@dataclass
class Call:
    """A request that came."""

    method: str
    path: str
    query: dict[str, str]
    token: str | None


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

    # -- what the service does -----------------------------------------------------------------------

    def create(self, parent: str, query: dict[str, str], body: dict[str, Any]) -> dict[str, Any]:
        check("QueuedResource", body, "queued_resource")
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
        if state in {"ACTIVE", "PROVISIONING"} and query.get("force") != "true":
            message = "Queued resource must be in FAILED or SUSPENDED state, or force must be set, to be deleted."
            raise RefusedError(400, "FAILED_PRECONDITION", message)
        del self.resources[name]
        self.drop_nodes(name)
        return self.operation(name)

    def operation(self, target: str) -> dict[str, Any]:
        name = f"{target.rsplit('/', 2)[0]}/operations/operation-{uuid.uuid4().hex[:8]}"
        self.operations[name] = {"name": name, "done": False, "metadata": {"target": target}}
        return self.operations[name]

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

    def publish(self, node: str, **attributes: str) -> None:
        """As the VM's startup script does."""
        self.attributes.setdefault(node, {}).update(
            {f"rig/{key}": value for key, value in attributes.items()}
        )


PARENT = r"(projects/[^/]+/locations/[^/]+)"


def _listed(parent: str, things: dict[str, dict[str, Any]]) -> list[dict[str, Any]]:
    start = parent.removesuffix("-")
    return [value for name, value in things.items() if name.startswith(start)]


def _get(things: dict[str, dict[str, Any]], name: str) -> dict[str, Any]:
    if name not in things:
        raise not_found(name)
    return things[name]


ROUTES: list[tuple[str, str, Any]] = [
    ("POST", rf"{PARENT}/queuedResources", lambda t, n, q, b: t.create(n, q, b)),
    (
        "GET",
        rf"{PARENT}/queuedResources",
        lambda t, n, q, b: {"queuedResources": _listed(n, t.resources)},
    ),
    ("GET", rf"({PARENT}/queuedResources/[^/:]+)", lambda t, n, q, b: _get(t.resources, n)),
    ("DELETE", rf"({PARENT}/queuedResources/[^/:]+)", lambda t, n, q, b: t.delete(n, q)),
    ("GET", rf"({PARENT}/nodes/[^/:]+)", lambda t, n, q, b: _get(t.nodes, n)),
    (
        "POST",
        rf"({PARENT}/nodes/[^/:]+):getGuestAttributes",
        lambda t, n, q, b: t.guest_attributes(n, b.get("queryPath", "")),
    ),
    ("GET", rf"({PARENT}/operations/[^/:]+)", lambda t, n, q, b: _get(t.operations, n)),
    (
        "GET",
        rf"{PARENT}/acceleratorTypes",
        lambda t, n, q, b: {"acceleratorTypes": [{"type": "v5litepod-1"}]},
    ),
]


class Door:
    """An HTTP server on loopback for as long as the `with` lasts."""

    def __init__(self, handler: type[BaseHTTPRequestHandler]) -> None:
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        self.address = f"127.0.0.1:{self._server.server_address[1]}"
        self._thread = threading.Thread(
            target=self._server.serve_forever, args=(0.02,), daemon=True
        )

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def answer(self, code: int, body: bytes, kind: str) -> None:
        self.send_response(code)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def body(self) -> bytes:
        return self.rfile.read(int(self.headers.get("Content-Length") or 0))

    def log_message(self, *_: object) -> None:
        pass


def rest_door(tpu: FakeTpu) -> Door:
    """tpu.googleapis.com."""
    lock = threading.Lock()

    def answer_to(call: Call, body: dict[str, Any]) -> dict[str, Any]:
        if tpu.good_tokens is not None and call.token not in tpu.good_tokens:
            message = "Request had invalid authentication credentials."
            raise RefusedError(401, "UNAUTHENTICATED", message)
        refused = tpu.next_answers.pop(0) if tpu.next_answers else None
        if refused:
            raise refused
        for method, pattern, handler in ROUTES:
            found = re.fullmatch(f"/v2alpha1/{pattern}", call.path)
            if method == call.method and found:
                result: dict[str, Any] = handler(tpu, found[1], call.query, body)
                return result
        raise not_found(call.path)

    class Rest(_Handler):
        def any_method(self) -> None:
            url = urlsplit(self.path)
            raw = self.body()
            token = (self.headers.get("Authorization") or "").removeprefix("Bearer ") or None
            call = Call(self.command, unquote(url.path), dict(parse_qsl(url.query)), token)
            with lock:
                tpu.calls.append(call)
                try:
                    code, out = 200, answer_to(call, json.loads(raw) if raw else {})
                except RefusedError as refused:
                    code = refused.code
                    out = {
                        "error": {
                            "code": code,
                            "message": refused.message,
                            "status": refused.status,
                        }
                    }
            if call.method == "POST" and code == 200 and tpu.lost_answers:
                tpu.lost_answers -= 1
                self.close_connection = True
                return
            self.answer(code, json.dumps(out).encode(), "application/json")

        do_GET = do_POST = do_DELETE = any_method  # noqa: N815

    return Door(Rest)


def metadata_door(tpu: FakeTpu, node: str, values: dict[str, str]) -> Door:
    """metadata.google.internal as `node` sees it; `values` are its metadata."""
    base = "/computeMetadata/v1/instance/"

    class Metadata(_Handler):
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
            else:
                self.answer(404, b"", "text/plain")

        do_GET = do_PUT = any_method  # noqa: N815

    return Door(Metadata)
