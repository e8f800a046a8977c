"""What the fakes of Google's services share: HTTP on loopback, refusals, and requests checked against Google's own discovery documents.

A path, a query parameter, a field or a value that a service's document does not have is refused as the service refuses it.
"""

from __future__ import annotations

import functools
import json
import re
import threading
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib import resources
from typing import TYPE_CHECKING, Any, Self

if TYPE_CHECKING:
    from collections.abc import Iterator

DOCUMENTS = (
    "tpu.v2alpha1", "compute.v1", "secretmanager.v1", "cloudbilling.v1", "serviceusage.v1", "cloudresourcemanager.v1",
)  # fmt: skip
# Kinds of JSON, by the documents' names; a wrong one is refused. int64 is a string there.
KINDS = {"array": list, "object": dict, "boolean": bool, "string": str, "integer": int}


class RefusedError(Exception):
    """An answer other than 200. Compute Engine's have no status."""

    def __init__(self, code: int, status: str, message: str) -> None:
        super().__init__(message)
        self.code, self.status, self.message = code, status, message

    @property
    def body(self) -> dict[str, Any]:
        """As it is sent."""
        status = {"status": self.status} if self.status else {}
        return {"error": {"code": self.code, "message": self.message, **status}}


def not_found(name: str) -> RefusedError:
    return RefusedError(404, "NOT_FOUND", f"Resource '{name}' was not found")


@dataclass
class Call:
    """A request that came."""

    method: str
    path: str
    query: dict[str, str]
    token: str | None
    body: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Request:
    """A call that a service's document knows."""

    method: str
    """The document's id of it: `tpu.projects.locations.queuedResources.create`."""
    name: str
    """The resource: the path without version and verb, and without the collection that is created in or listed."""
    query: dict[str, str]
    body: dict[str, Any]
    document: str
    answer: str
    """Schema of what is answered."""


@functools.cache
def document(name: str) -> dict[str, Any]:
    """A discovery document, as google-api-python-client ships it."""
    file = resources.files("googleapiclient.discovery_cache.documents") / f"{name}.json"
    found: dict[str, Any] = json.loads(file.read_text())
    return found


@functools.cache
def _methods(name: str) -> list[tuple[str, re.Pattern[str], dict[str, Any]]]:
    def walk(resource: dict[str, Any]) -> Iterator[dict[str, Any]]:
        yield from resource.get("methods", {}).values()
        for child in resource.get("resources", {}).values():
            yield from walk(child)

    start = f"/{document(name)['servicePath']}"
    return [
        (
            one["httpMethod"],
            re.compile(
                re.escape(start) + re.sub(r"\{\w+\}", "[^/:]+", one.get("flatPath", one["path"]))
            ),
            one,
        )
        for one in walk(document(name))
    ]


def understood(call: Call) -> Request:
    """The method that the call is for, with everything in it checked.

    Raises:
        RefusedError: no service has that path, or not those parameters, fields or values.
    """
    body = call.body
    for name in DOCUMENTS:
        for verb, pattern, method in _methods(name):
            if verb == call.method and pattern.fullmatch(call.path):
                known = {**method.get("parameters", {}), **document(name).get("parameters", {})}
                for key in call.query:
                    if key not in known or known[key].get("location") != "query":
                        message = f'Invalid JSON payload received. Unknown name "{key}": Cannot bind query parameter.'
                        raise RefusedError(400, "INVALID_ARGUMENT", message)
                if "request" in method:
                    check(name, method["request"]["$ref"], body, "")
                elif body:
                    raise RefusedError(400, "INVALID_ARGUMENT", "Request body is not allowed")
                resource = _resource(call.path, method)
                answer = method["response"]["$ref"]
                return Request(method["id"], resource, call.query, body, name, answer)
    raise RefusedError(
        404, "NOT_FOUND", f"The requested URL {call.path} was not found on this server."
    )


def _resource(path: str, method: dict[str, Any]) -> str:
    name = re.sub(r"^/(compute/)?v\d\w*/", "", path)
    name = re.sub(r":\w+$", "", name)
    in_collection = method["id"].rsplit(".", 1)[1] in {"create", "insert", "list"}
    return name.rsplit("/", 1)[0] if in_collection else name


def check(name: str, schema: str, body: dict[str, Any], path: str) -> None:
    """Refuses fields and values that the schema does not have."""
    _check_value(name, document(name)["schemas"][schema], body, path)


def _check_fields(name: str, known: dict[str, Any], body: dict[str, Any], path: str) -> None:
    for key, value in body.items():
        if key not in known:
            at = f" at '{path}'" if path else ""
            message = f'Invalid JSON payload received. Unknown name "{key}"{at}: Cannot find field.'
            raise RefusedError(400, "INVALID_ARGUMENT", message)
        _check_value(name, known[key], value, f"{path}.{key}" if path else key)


def _check_value(name: str, wanted: dict[str, Any], value: Any, path: str) -> None:
    if "$ref" in wanted:
        wanted = document(name)["schemas"][wanted["$ref"]]
    kind = KINDS.get(wanted.get("type", ""))
    if kind and (not isinstance(value, kind) or (kind is int and isinstance(value, bool))):
        raise RefusedError(400, "INVALID_ARGUMENT", f"Invalid value at '{path}' ({value!r})")
    if "enum" in wanted and value not in wanted["enum"]:
        raise RefusedError(400, "INVALID_ARGUMENT", f"Invalid value at '{path}' ({value!r})")
    if "properties" in wanted:
        _check_fields(name, wanted["properties"], value, path)
    elif "additionalProperties" in wanted:
        for key, one in value.items():
            _check_value(name, wanted["additionalProperties"], one, f"{path}[{key}]")
    elif "items" in wanted:
        for index, one in enumerate(value):
            _check_value(name, wanted["items"], one, f"{path}[{index}]")


def check_answer(request: Request, answer: dict[str, Any]) -> None:
    """The fake says nothing that the service could not say: no field that its document does not have."""

    def walk(wanted: dict[str, Any], value: Any, path: str) -> None:
        if "$ref" in wanted:
            wanted = document(request.document)["schemas"][wanted["$ref"]]
        if "properties" in wanted:
            for key, one in value.items():
                assert key in wanted["properties"], (
                    f"the fake's {request.method} answers {path}.{key}"
                )
                walk(wanted["properties"][key], one, f"{path}.{key}")
        for index, one in enumerate(value if "items" in wanted else []):
            walk(wanted["items"], one, f"{path}[{index}]")

    walk({"$ref": request.answer}, answer, request.answer)


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


class Handler(BaseHTTPRequestHandler):
    """One request, one answer."""

    protocol_version = "HTTP/1.1"
    # Head and body leave together: apart, each answer would wait for the client's delayed acknowledgement.
    wbufsize = -1

    def answer(self, code: int, body: bytes, kind: str) -> None:
        self.send_response(code)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def answer_json(self, code: int, body: object) -> None:
        self.answer(code, json.dumps(body).encode(), "application/json")

    def body(self) -> bytes:
        return self.rfile.read(int(self.headers.get("Content-Length") or 0))

    def log_message(self, *_: object) -> None:
        pass
