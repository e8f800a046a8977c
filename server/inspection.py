"""The routes that only look: health, models, metrics, and what the engine is and how it is bound.

None of them waits for the engine thread or runs the engine.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse

from server.engine import installed_versions
from server.metrics import CONTENT_TYPE
from server.worker import THREAD_NAME

if TYPE_CHECKING:
    from server.service import Service

router = APIRouter()

ENGINE_CLASS = f"Engine — #[pyclass(unsendable)], owned by thread {THREAD_NAME}"
BINDING = "PyO3 module torchtpu_rs._native, Rust over ATen through a C ABI"


@router.get("/")
async def root(request: Request) -> Response:
    """What this server is."""
    return JSONResponse({"name": "torchtpu-rs", "status": _service(request).state()})


@router.get("/live")
async def live() -> Response:
    """200 while the event loop turns."""
    return JSONResponse({"status": "ok"})


@router.get("/ready")
@router.get("/health")
async def health(request: Request) -> Response:
    """200 when requests are served; 503 with the reason while they are not."""
    body = _service(request).health()
    if body["status"] == "ok":
        return JSONResponse(body)
    return JSONResponse(body, 503, headers={"retry-after": "5"})


@router.get("/metrics")
async def metrics(request: Request) -> Response:
    """Prometheus text."""
    body = _service(request).metrics.exposition()
    return Response(body, headers={"content-type": CONTENT_TYPE})


@router.get("/models")
async def models(request: Request) -> Response:
    """The served names."""
    service = _service(request)
    data = [_model(service, name) for name in service.loader.names]
    return JSONResponse({"object": "list", "data": data})


@router.get("/models/{name:path}")
async def model(request: Request, name: str) -> Response:
    """One served name, which may hold slashes."""
    service = _service(request)
    return JSONResponse(_model(service, service.model_name(name)))


@router.get("/version")
async def version() -> Response:
    """The version of the package."""
    return JSONResponse({"version": installed_versions()["torchtpu_rs"]})


@router.get("/engine")
async def engine(request: Request) -> Response:
    """Versions, how the engine is bound, its layout, device and dtype, its load and warmup seconds, its thread."""
    service = _service(request)
    worker, loader = service.worker, service.loader
    progress = worker.progress
    return JSONResponse(
        {
            "object": "engine",
            "status": service.state(),
            "phase": progress.phase,
            "progress": progress.fraction,
            "model": loader.names[0],
            "engine_class": ENGINE_CLASS,
            "binding": BINDING,
            "threads": worker.info.get("threads"),
            "thread": {
                "name": worker.name,
                "native_id": worker.native_id,
                "alive": worker.is_alive(),
            },
            "versions": {**installed_versions(), "rustc": loader.build.get("rustc")},
            "build": dict(loader.build),
            "load_seconds": round(loader.load_seconds, 3),
            "warmup_seconds": round(loader.warmup_seconds, 3),
            **{
                key: value
                for key, value in worker.info.items()
                if key not in ("load_seconds", "checkpoint", "threads")
            },
            "checkpoint": [*service.settings.model],
            "decoding": "greedy",
            "requests": {
                "running": worker.running,
                "waiting": worker.waiting,
                "max_queue": worker.max_queue,
            },
        }
    )


def _model(service: Service, name: str) -> dict[str, Any]:
    """One entry of `/v1/models`, with vLLM's and llama.cpp's additions; facts of the engine are null while it loads."""
    info = service.worker.info
    context = info.get("layout", {}).get("context")
    return {
        "id": name,
        "object": "model",
        "created": int(service.started),
        "owned_by": "torchtpu_rs",
        "root": service.settings.model[0],
        "parent": None,
        "max_model_len": context,
        "meta": {
            "n_ctx": context,
            "n_vocab": info.get("vocab_size"),
            "size": info.get("weight_bytes"),
            "dtype": info.get("dtype"),
            "weight_format": info.get("weight_format"),
        },
    }


def _service(request: Request) -> Service:
    service: Service = request.app.state.service
    return service
