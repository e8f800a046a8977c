"""The engine thread alone: order, bounds, cancelling, crashes, and whose thread it all happens on."""

from __future__ import annotations

import queue
import threading
from typing import TYPE_CHECKING

import pytest

from server.engine import Event, Failed, Finished, Job, Started, Tokens
from server.worker import THREAD_NAME, EngineWorker, Progress, QueueFullError
from tests.fakes import PATIENCE_SECONDS, FakeEngine, Gate

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from server.engine import Engine


class Inbox:
    """Where a job's events arrive in a test."""

    def __init__(self) -> None:
        self._events: queue.SimpleQueue[Event] = queue.SimpleQueue()

    def job(self, *token_ids: int, max_new: int = 50, stop_ids: list[int] | None = None) -> Job:
        return Job(list(token_ids) or [2], max_new, stop_ids, self._events.put)

    def until_last(self) -> list[Event]:
        """The events of a job up to the one that ends it."""
        events: list[Event] = []
        while not events or not isinstance(events[-1], (Finished, Failed)):
            events.append(self._events.get(timeout=PATIENCE_SECONDS))
        return events

    def token_ids(self) -> list[int]:
        events = self.until_last()
        assert isinstance(events[0], Started)
        return [i for event in events if isinstance(event, Tokens) for i in event.token_ids]


@pytest.fixture
def start() -> Iterator[Callable[..., EngineWorker]]:
    workers: list[EngineWorker] = []

    def make(engine: FakeEngine, *, max_queue: int = 8) -> EngineWorker:
        ready = threading.Event()

        def on_progress(progress: Progress) -> None:
            if progress.phase in ("ready", "failed"):
                ready.set()

        worker = EngineWorker(
            lambda report: engine.built_here(), max_queue=max_queue, on_progress=on_progress
        )
        workers.append(worker)
        worker.start()
        assert ready.wait(PATIENCE_SECONDS)
        return worker

    yield make
    for worker in workers:
        worker.stop()
        worker.join(PATIENCE_SECONDS)
        assert not worker.is_alive()


def test_the_engine_is_built_used_and_asked_on_one_thread_of_its_name(
    start: Callable[..., EngineWorker],
) -> None:
    engine = FakeEngine([201, 202])
    worker = start(engine)
    inbox = Inbox()
    worker.submit(inbox.job())
    # FakeEngine panics when any other thread than the one that built it touches it.
    assert inbox.token_ids() == [201, 202]
    assert (worker.name, worker.ready) == (THREAD_NAME, True)
    assert worker.info["vocab_size"] == 900


def test_events_of_a_job_are_started_then_tokens_then_one_end(
    start: Callable[..., EngineWorker],
) -> None:
    worker = start(FakeEngine([201, (202, 203)]))
    inbox = Inbox()
    worker.submit(inbox.job())
    events = inbox.until_last()
    assert [type(event) for event in events] == [Started, Tokens, Tokens, Finished]
    end = events[-1]
    assert isinstance(end, Finished)
    assert (end.finish, end.stop_id, end.prefill_seconds, end.decode_seconds) == (
        "stop",
        106,
        0.25,
        0.5,
    )


def test_jobs_run_in_arrival_order_one_at_a_time(start: Callable[..., EngineWorker]) -> None:
    gate = Gate()
    engine = FakeEngine(play=lambda ids: [gate, ids[0]])
    worker = start(engine)
    inboxes = [Inbox() for _ in range(5)]
    for number, inbox in enumerate(inboxes):
        worker.submit(inbox.job(200 + number))
    gate.wait_until_reached()
    assert (worker.running, worker.waiting, len(engine.calls)) == (1, 4, 1)
    gate.open()
    assert [inbox.token_ids() for inbox in inboxes] == [[200], [201], [202], [203], [204]]
    assert [call.token_ids for call in engine.calls] == [(200,), (201,), (202,), (203,), (204,)]
    assert (worker.running, worker.waiting) == (0, 0)


def test_the_queue_is_bounded_and_what_was_admitted_before_may_pass(
    start: Callable[..., EngineWorker],
) -> None:
    gate = Gate()
    worker = start(FakeEngine([gate, 201]), max_queue=1)
    inboxes = [Inbox() for _ in range(3)]
    worker.submit(inboxes[0].job())
    gate.wait_until_reached()
    worker.submit(inboxes[1].job())
    with pytest.raises(QueueFullError):
        worker.submit(Inbox().job())
    worker.submit(inboxes[2].job(), admitted=True)
    gate.open()
    assert [inbox.token_ids() for inbox in inboxes] == [[201]] * 3


def test_without_a_queue_the_next_job_may_come_with_the_last_event(
    start: Callable[..., EngineWorker],
) -> None:
    worker = start(FakeEngine([201]), max_queue=0)
    inbox = Inbox()

    def submit_next(event: Event) -> None:
        if isinstance(event, Finished):
            worker.submit(inbox.job())

    worker.submit(Job([2], 50, None, submit_next))
    assert inbox.token_ids() == [201]


def test_a_cancelled_running_job_stops_before_its_next_step(
    start: Callable[..., EngineWorker],
) -> None:
    gate = Gate()
    engine = FakeEngine([201, gate, 202, 203, 204])
    worker = start(engine)
    inbox = Inbox()
    job = inbox.job()
    worker.submit(job)
    gate.wait_until_reached()
    worker.cancel(job)
    gate.open()
    end = inbox.until_last()[-1]
    assert isinstance(end, Finished)
    assert (end.finish, engine.made) == ("cancelled", 2)


def test_a_cancelled_waiting_job_never_reaches_the_engine(
    start: Callable[..., EngineWorker],
) -> None:
    gate = Gate()
    engine = FakeEngine([gate, 201])
    worker = start(engine)
    first, gone, last = Inbox(), Inbox(), Inbox()
    worker.submit(first.job(300))
    gate.wait_until_reached()
    job = gone.job(301)
    worker.submit(job)
    worker.submit(last.job(302))
    worker.cancel(job)
    assert worker.waiting == 1
    gate.open()
    assert last.token_ids() == [201]
    assert [call.token_ids for call in engine.calls] == [(300,), (302,)]


class RustPanic(BaseException):
    """As pyo3_runtime.PanicException: no Exception."""


@pytest.mark.parametrize("crash", [RuntimeError("device lost"), RustPanic("index out of bounds")])
def test_a_crash_fails_its_job_and_no_other(
    start: Callable[..., EngineWorker],
    crash: BaseException,
    caplog: pytest.LogCaptureFixture,
) -> None:
    engine = FakeEngine([201, crash])
    worker = start(engine)
    inbox = Inbox()
    worker.submit(inbox.job())
    end = inbox.until_last()[-1]
    # What the crash said is for the log; clients see no internals.
    assert end == Failed("The engine failed on this request.", caller_fault=False)
    assert str(crash) in caplog.text
    engine.script = [202]
    worker.submit(inbox.job())
    assert inbox.token_ids() == [202]
    assert worker.ready


def test_a_value_error_is_the_callers_fault_and_keeps_its_words(
    start: Callable[..., EngineWorker],
) -> None:
    worker = start(FakeEngine([ValueError("expected 1, found 2")]))
    inbox = Inbox()
    worker.submit(inbox.job())
    assert inbox.until_last()[-1] == Failed("expected 1, found 2", caller_fault=True)


def test_a_load_that_fails_is_reported_and_ends_the_thread() -> None:
    phases: list[str] = []

    def load(report: Callable[[Progress], None]) -> Engine:
        report(Progress("weights", 1, 4))
        raise ValueError("model.safetensors: expected 4 tensors, found 1")

    worker = EngineWorker(load, max_queue=1, on_progress=lambda seen: phases.append(seen.phase))
    worker.start()
    worker.join(PATIENCE_SECONDS)
    assert phases == ["weights", "failed"]
    assert str(worker.failure) == "model.safetensors: expected 4 tensors, found 1"
    assert not worker.ready


def test_stop_cancels_what_runs_and_forgets_what_waits(start: Callable[..., EngineWorker]) -> None:
    gate = Gate()
    engine = FakeEngine([gate, 201, 202])
    worker = start(engine)
    running, waiting = Inbox(), Inbox()
    worker.submit(running.job())
    worker.submit(waiting.job())
    gate.wait_until_reached()
    worker.stop()
    gate.open()
    end = running.until_last()[-1]
    assert isinstance(end, Finished)
    assert end.finish == "cancelled"
    worker.join(PATIENCE_SECONDS)
    assert (worker.progress.phase, len(engine.calls)) == ("stopped", 1)


def test_positions_follow_the_running_job(start: Callable[..., EngineWorker]) -> None:
    gate = Gate()
    worker = start(FakeEngine([201, 202, gate]))
    inbox = Inbox()
    worker.submit(inbox.job(5, 6, 7))
    gate.wait_until_reached()
    assert worker.positions == 5
    gate.open()
    inbox.until_last()
    assert worker.positions == 0
