"""The engine thread and the bounded queue in front of it.

Knows jobs, events and token ids; knows no HTTP, no text and no asyncio. Results leave through `job.emit`.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

from server.engine import Failed, Finish, Finished, Job, Started, Tokens

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from server.engine import Engine

logger = logging.getLogger(__name__)

THREAD_NAME = "torchtpu-rs-engine"

Phase = Literal["starting", "files", "weights", "compile", "warmup", "ready", "failed", "stopped"]


@dataclass(frozen=True, slots=True)
class Progress:
    """How far loading is; replaced whole, so any thread may read it."""

    phase: Phase = "starting"
    done: int = 0
    total: int = 0

    @property
    def fraction(self) -> float:
        """0 to 1 within the phase."""
        return round(self.done / self.total, 4) if self.total else 0.0


class QueueFullError(Exception):
    """The bound on waiting jobs is reached."""


class EngineWorker(threading.Thread):
    """The one thread that builds, owns and drops the engine.

    `on_alive` is called between steps and, with nothing to do, every `alive_every` seconds; a hung step keeps it silent.
    Jobs run in arrival order, one at a time. A job whose `cancelled` flag is set stops before its next step, and one
    that still waits is forgotten, so a client that left can hold the engine for one prefill at most.
    """

    def __init__(
        self,
        load: Callable[[Callable[[Progress], None]], Engine],
        *,
        max_queue: int,
        read_every: int = 1,
        on_progress: Callable[[Progress], object] = lambda progress: None,
        on_alive: Callable[[], object] = lambda: None,
        alive_every: float = 0.0,
    ) -> None:
        # A daemon: a step that hangs in native code must not keep the process from exiting.
        super().__init__(name=THREAD_NAME, daemon=True)
        self.progress = Progress()
        self.failure: BaseException | None = None
        self.info: Mapping[str, Any] = {}
        self.max_queue = max_queue
        self.positions = 0
        self._load = load
        self._read_every = read_every
        self._on_progress = on_progress
        self._on_alive = on_alive
        self._idle_seconds = alive_every or None
        self._changed = threading.Condition()
        self._waiting: deque[Job] = deque()
        self._running: Job | None = None
        self._stopping = False

    @property
    def ready(self) -> bool:
        """The engine is built, warm and its thread alive."""
        return self.progress.phase == "ready" and self.is_alive()

    @property
    def waiting(self) -> int:
        """Jobs in the queue."""
        return len(self._waiting)

    @property
    def running(self) -> int:
        """Jobs in the engine: 0 or 1."""
        return int(self._running is not None)

    def submit(self, job: Job, *, admitted: bool = False) -> None:
        """Put `job` at the end of the queue. `admitted`: a later prompt of a request that was already let in.

        Raises:
            QueueFullError: as many jobs wait as may.
        """
        with self._changed:
            if not admitted and self.waiting + self.running > self.max_queue:
                raise QueueFullError
            self._waiting.append(job)
            self._changed.notify()

    def cancel(self, job: Job) -> None:
        """Stop `job` before its next step, or forget it if it still waits; no event follows in that case."""
        job.cancelled.set()
        with self._changed:
            if job in self._waiting:
                self._waiting.remove(job)

    def stop(self) -> None:
        """Cancel everything and end the thread after the step it is in."""
        with self._changed:
            self._stopping = True
            self._waiting.clear()
            if self._running is not None:
                self._running.cancelled.set()
            self._changed.notify()

    def run(self) -> None:
        """Build the engine, then serve jobs until `stop`."""
        try:
            engine = self._load(self._report)
            self.info = engine.info()
        # A Rust panic derives from BaseException and must reach whoever waits for the load, too.
        except BaseException as error:
            logger.debug("loading failed", exc_info=True)
            self.failure = error
            self._report(replace(self.progress, phase="failed"))
            return
        self._report(Progress("ready", 1, 1))
        while (job := self._next()) is not None:
            self._serve(engine, job)
        # The engine is unsendable: dropping its last reference here keeps the drop on its own thread.
        del engine
        self._report(Progress("stopped"))

    def _report(self, progress: Progress) -> None:
        self.progress = progress
        self._on_progress(progress)

    def _next(self) -> Job | None:
        with self._changed:
            while not self._waiting and not self._stopping:
                self._on_alive()
                self._changed.wait(self._idle_seconds)
            if self._stopping:
                return None
            self._running = self._waiting.popleft()
            return self._running

    def _serve(self, engine: Engine, job: Job) -> None:
        job.emit(Started(time.monotonic()))
        self.positions = len(job.token_ids)
        last = self._decode(engine, job)
        self.info = engine.info()
        self.positions = 0
        with self._changed:
            # Free before the last event goes out: whoever reads it may send the next request at once.
            self._running = None
        job.emit(last)

    def _decode(self, engine: Engine, job: Job) -> Finished | Failed:
        if job.cancelled.is_set():
            return Finished("cancelled", None, 0.0, 0.0, time.monotonic())

        def on_tokens(token_ids: list[int]) -> bool:
            self._on_alive()
            if token_ids:
                self.positions += len(token_ids)
                job.emit(Tokens(tuple(token_ids), time.monotonic()))
            return not job.cancelled.is_set()

        try:
            decoded = engine.decode(
                job.token_ids, job.max_new, job.stop_ids, self._read_every, on_tokens
            )
        except ValueError as error:
            return Failed(str(error), caller_fault=True)
        # The outermost handler of the engine thread: a crash, a Rust panic included, fails this job and no other.
        except BaseException:
            logger.exception("the engine failed")
            return Failed("The engine failed on this request.", caller_fault=False)
        return Finished(
            finish=_finish(decoded.finish),
            stop_id=decoded.stop_id,
            prefill_seconds=decoded.prefill_seconds,
            decode_seconds=decoded.decode_seconds,
            at=time.monotonic(),
        )


def _finish(name: str) -> Finish:
    if name == "stop":
        return "stop"
    if name == "length":
        return "length"
    return "cancelled"
