"""Asks an endpoint what it is, in the ways of torchtpu-rs, llama.cpp's server and vLLM. What it does not tell stays open."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import httpx

from bench.load import wire
from bench.load.result import Endpoint
from bench.load.wire import BenchmarkError, UnansweredError

if TYPE_CHECKING:
    from collections.abc import Mapping

PATIENCE_SECONDS = 10.0
# Where things lie on the server, and what changes while it runs.
NOT_KEPT = {"thread", "requests", "checkpoint", "phase", "progress", "status", "object"}
KEPT_OF_MODEL = ("max_model_len", "meta")
KEPT_OF_PROPS = ("build_info", "total_slots")
OWNERS = {"llamacpp": "llama.cpp", "vllm": "vLLM", "torchtpu_rs": "torchtpu-rs"}


async def identify(client: httpx.AsyncClient, model: str | None) -> Endpoint:
    """The endpoint, with the model that is asked for: the one given, else the first it lists.

    Raises:
        BenchmarkError: nobody answers, the key is refused, or no model is listed and none is given.
    """
    url = str(client.base_url).rstrip("/")
    try:
        async with asyncio.timeout(PATIENCE_SECONDS):
            answer = await client.get("/v1/models")
            listed = _listed(answer, model)
            told = await _object(client, "/v1/engine")
            props = await _object(client, "/props")
            version = await _object(client, "/version")
    except TimeoutError as error:
        raise UnansweredError(
            f"expected {url} to say what it serves within {PATIENCE_SECONDS:.0f} s, found no answer"
        ) from error
    except httpx.TransportError as error:
        raise UnansweredError(
            f"expected an answer from {url}, found {type(error).__name__} ({error})"
        ) from error
    info = {key: value for key, value in told.items() if key not in NOT_KEPT}
    info |= {key: listed[key] for key in KEPT_OF_MODEL if listed.get(key) is not None}
    info |= {key: props[key] for key in KEPT_OF_PROPS if key in props}
    return Endpoint(
        url=url,
        model=str(listed["id"]),
        server=_server(told, props, listed),
        version=_version(told, props, version),
        info=info,
    )


def _listed(answer: httpx.Response, model: str | None) -> Mapping[str, Any]:
    """The entry of the model that is asked for."""
    if answer.status_code == httpx.codes.NOT_FOUND and model is not None:
        return {"id": model}
    wire.check(answer)
    try:
        entries = [dict(one) for one in answer.json()["data"]]
        if model is not None:
            return next((one for one in entries if one["id"] == model), {"id": model})
        return entries[0] | {"id": entries[0]["id"]}
    except (ValueError, KeyError, TypeError, IndexError) as error:
        raise BenchmarkError(
            f"expected a list of models at /v1/models, found {answer.text[: wire.SHOWN]!r}; name one with --model"
        ) from error


async def _object(client: httpx.AsyncClient, path: str) -> Mapping[str, Any]:
    """What is there; nothing where there is nothing."""
    answer = await client.get(path)
    try:
        found = answer.json() if answer.is_success else {}
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


def _server(told: Mapping[str, Any], props: Mapping[str, Any], listed: Mapping[str, Any]) -> str:
    if told.get("object") == "engine":
        return "torchtpu-rs"
    if "build_info" in props:
        return "llama.cpp"
    owner = str(listed.get("owned_by", "unknown"))
    return OWNERS.get(owner, owner)


def _version(
    told: Mapping[str, Any], props: Mapping[str, Any], version: Mapping[str, Any]
) -> str | None:
    versions = told.get("versions")
    ours = versions.get("torchtpu_rs") if isinstance(versions, dict) else None
    found = ours or props.get("build_info") or version.get("version")
    return str(found) if found else None
