"""What the routes of one app share: the worker, the text side, the metrics, the requests in flight, and draining.

Owns no HTTP: it answers whether requests may be served, and if not, why.
"""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, Any, Protocol

from server.admission import Limits
from server.errors import ApiError, clip, server_error, unavailable
from server.metrics import Metrics
from server.notify import Notifier
from server.refusals import UnknownFields
from server.worker import EngineWorker, Progress

if TYPE_CHECKING:
    from collections.abc import Callable

    from server.admission import TextSide
    from server.loading import ModelLoader
    from server.settings import Settings


class InFlight(Protocol):
    """An answer that is being made."""

    def cut(self) -> None:
        """End it now, with an error."""


def default_read_every(settings: Settings) -> int:
    """Where a launch makes many tokens, handing them out one by one would waste it."""
    on_tpu = settings.device.partition(":")[0] == "tpu"
    return 32 if on_tpu and settings.mode in (None, "compiled") else 1


class Service:
    """The state of one app; everything but the worker's own thread happens on the event loop."""

    def __init__(
        self,
        settings: Settings,
        loader: ModelLoader,
        on_progress: Callable[[Progress], object] = lambda progress: None,
        notifier: Notifier | None = None,
    ) -> None:
        self.settings = settings
        self.loader = loader
        self.metrics = Metrics()
        self.unknown_fields = UnknownFields()
        self.active: set[InFlight] = set()
        self.draining = False
        self.started = time.time()
        self._on_progress = on_progress
        self.notifier = notifier or Notifier({})
        self._idle = asyncio.Event()
        self.worker = EngineWorker(
            loader,
            max_queue=settings.max_queue,
            read_every=settings.read_every or default_read_every(settings),
            on_progress=self._progressed,
            on_alive=self.notifier.alive,
            alive_every=self.notifier.alive_every,
        )
        self.metrics.watch(
            running=lambda: self.worker.running,
            waiting=lambda: self.worker.waiting,
            cache_usage=self._cache_usage,
            engine=lambda: self.worker.info,
        )

    @property
    def text(self) -> TextSide:
        """Tokenizer and template.

        Raises:
            ApiError: 503 while the model loads.
        """
        self.require_ready()
        assert self.loader.text is not None  # set before the worker is ready
        return self.loader.text

    @property
    def limits(self) -> Limits:
        """What requests are checked against; valid once `require_ready` passes."""
        return Limits.from_info(self.worker.info)

    def state(self) -> str:
        """`ok`, `loading`, `draining`, `failed` or `dead`."""
        if self.draining:
            return "draining"
        if self.worker.ready:
            return "ok"
        phase = self.worker.progress.phase
        if phase == "failed":
            return "failed"
        return "dead" if phase in ("ready", "stopped") else "loading"

    def require_ready(self) -> None:
        """Let a request in, or say why not.

        Raises:
            ApiError: 503 while loading or draining, 500 when the engine thread is gone.
        """
        match self.state():
            case "ok":
                return
            case "loading":
                progress = self.worker.progress
                raise unavailable(
                    f"The model is loading ({progress.phase}, {progress.fraction:.0%}); try again soon.",
                    "model_loading",
                    retry_after=5,
                )
            case "draining":
                raise unavailable("The server is shutting down.", "server_draining", retry_after=5)
            case _:
                raise server_error("The engine thread has ended; restart the server.")

    def model_name(self, asked: str | None) -> str:
        """The name an answer carries.

        Raises:
            ApiError: 404 for a model that is not served here.
        """
        names = self.loader.names
        if asked is None:
            return names[0]
        if asked not in names:
            raise ApiError(
                404,
                f"The model {clip(asked, 200)!r} does not exist; this server has {', '.join(names)}.",
                param="model",
                code="model_not_found",
            )
        return asked

    def released(self, answer: InFlight) -> None:
        """An answer is over."""
        self.active.discard(answer)
        if not self.active:
            self._idle.set()

    async def drain(self) -> None:
        """Refuse new requests, let running ones end, cut those that take too long. Returns when none is left."""
        self.draining = True
        self.notifier.stopping()
        await self._wait_until_idle(self.settings.drain_seconds)
        for answer in list(self.active):
            answer.cut()
        # A cut answer only needs the time to write its last frame; a reader that takes none gets no more.
        await self._wait_until_idle(2.0)

    async def _wait_until_idle(self, patience: float) -> None:
        self._idle.clear()
        if not self.active:
            return
        try:
            async with asyncio.timeout(patience):
                await self._idle.wait()
        except TimeoutError:
            return

    def _cache_usage(self) -> float:
        return self.worker.positions / self.limits.context if self.worker.info else 0.0

    def _progressed(self, progress: Progress) -> None:
        if progress.phase == "ready":
            facts = self.worker.info
            self.metrics.loaded(
                {
                    "version": self.loader.build.get("crate", "unknown"),
                    "device": str(facts.get("device", "unknown")),
                    "dtype": str(facts.get("dtype", "unknown")),
                    "model": self.loader.names[0],
                },
                self.loader.load_seconds,
                self.loader.warmup_seconds,
            )
        self.notifier.progress(progress)
        self._on_progress(progress)

    def health(self) -> dict[str, Any]:
        """The body of `/health`."""
        state = self.state()
        body: dict[str, Any] = {"status": state}
        if state == "loading":
            progress = self.worker.progress
            body |= {
                "phase": progress.phase,
                "progress": progress.fraction,
                "done": progress.done,
                "total": progress.total,
                "elapsed_seconds": round(time.time() - self.started, 3),
            }
        elif state == "failed":
            body["error"] = str(self.worker.failure)
        if self.loader.programs is not None:
            body["programs"] = self.loader.programs
        return body
