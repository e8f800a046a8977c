"""The API description: request schemas from `protocol`, and that an answer may be a stream.

Routes read their bodies themselves, so FastAPI sees no parameters; this fills in what it cannot know.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fastapi.openapi.utils import get_openapi
from pydantic.json_schema import models_json_schema

from server.protocol import ChatRequest, CompletionRequest, DetokenizeRequest, TokenizeRequest

if TYPE_CHECKING:
    from fastapi import FastAPI

    from server.protocol import WireModel

BODIES: dict[str, type[WireModel]] = {
    "/v1/chat/completions": ChatRequest,
    "/v1/completions": CompletionRequest,
    "/v1/chat/completions/render": ChatRequest,
    "/v1/tokenize": TokenizeRequest,
    "/v1/detokenize": DetokenizeRequest,
}
STREAMS = ("/v1/chat/completions", "/v1/completions")
REFERENCE = "#/components/schemas/{model}"

ERROR_SCHEMA: dict[str, Any] = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": ["string", "null"]},
            },
        }
    },
}


def describe(app: FastAPI) -> dict[str, Any]:
    """The OpenAPI document of `app`."""
    document = get_openapi(
        title=app.title, version=app.version, description=app.description, routes=app.routes
    )
    kinds = sorted(set(BODIES.values()), key=lambda kind: kind.__name__)
    _, definitions = models_json_schema(
        [(kind, "validation") for kind in kinds], ref_template=REFERENCE
    )
    schemas = document.setdefault("components", {}).setdefault("schemas", {})
    schemas |= definitions["$defs"] | {"Error": ERROR_SCHEMA}
    for path, operations in document["paths"].items():
        for operation in operations.values():
            _complete(path, operation)
    return document


def _complete(path: str, operation: dict[str, Any]) -> None:
    responses = operation["responses"]
    responses.pop("422", None)  # never sent: a bad field is 400
    responses["4XX"] = responses["5XX"] = {
        "description": "Refused, or failed",
        "content": {"application/json": {"schema": {"$ref": REFERENCE.format(model="Error")}}},
    }
    if path in BODIES:
        schema = {"$ref": REFERENCE.format(model=BODIES[path].__name__)}
        operation["requestBody"] = {
            "required": True,
            "content": {"application/json": {"schema": schema}},
        }
    if path in STREAMS:
        responses["200"]["content"]["text/event-stream"] = {"schema": {"type": "string"}}
