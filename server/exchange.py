"""One inference request from the queue to its last frame: submitting, waiting, cancelling, counting.

The only place where the engine's events meet a client. A stream and a whole answer read the same steps; a client that
leaves, a stop string and the end of a drain all cancel the job here. Knows no route and no socket.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

from starlette.responses import JSONResponse, Response

from server.answer import Choice, Totals, new_reader
from server.delivery import EventStream, Mailbox
from server.engine import Event, Failed, Finished, Job, Started, Tokens
from server.errors import ApiError, invalid, server_error, unavailable
from server.streaming import DONE, PING, Fold, error_frame, frame
from server.worker import QueueFullError

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

    from starlette.types import Receive

    from server.admission import Admission, Prompt
    from server.answer import Delta, FinishReason
    from server.service import Service
    from server.streaming import Wire

logger = logging.getLogger(__name__)

# nginx's code for a client that closed the connection; it only shows in the log and in metrics.
CLIENT_LEFT_STATUS = 499


class ClientLeftError(Exception):
    """The client closed the connection; nobody would read an answer."""


@dataclass(frozen=True, slots=True)
class Opened:
    """The first event of a choice is here, so the request was not refused."""

    index: int


@dataclass(frozen=True, slots=True)
class Grew:
    """A choice has more to show."""

    index: int
    deltas: list[Delta]


@dataclass(frozen=True, slots=True)
class Closed:
    """A choice is over; `is_last` on the last one of the answer."""

    index: int
    reason: FinishReason
    is_last: bool


@dataclass(frozen=True, slots=True)
class Silence:
    """Nothing happened for as long as a proxy may be trusted to wait."""


Step = Opened | Grew | Closed | Silence


class Exchange:
    """One admitted request; `respond` is called once."""

    def __init__(
        self, service: Service, admission: Admission, wire: Wire, *, endpoint: str, arrived: float
    ) -> None:
        self._service = service
        # Raises while draining, so nothing is admitted that nobody would wait for.
        self._tokenizer = service.text.tokenizer
        self._worker = service.worker
        self._metrics = service.metrics
        self._admission = admission
        self._wire = wire
        self._endpoint = endpoint
        self._arrived = arrived
        self._mailbox: Mailbox[Event | Literal["left", "cut"]] = Mailbox()
        self._job: Job | None = None
        self._watcher: asyncio.Task[None] | None = None
        self._submitted = arrived
        self._totals = Totals(prompt_tokens=admission.prompt_tokens)
        self._reason: FinishReason = "stop"
        self._first_token_seen = False
        self._last_token_at = arrived

    async def respond(self, receive: Receive) -> Response:
        """The response, once it is certain that it is no error, or that finding out takes longer than a ping.

        Raises:
            ApiError: the queue is full, or the engine failed before the first token.
        """
        self._watcher = asyncio.create_task(self._watch(receive))
        try:
            if not self._admission.stream:
                return JSONResponse(await self._whole(), headers=self._stage_headers())
            frames = self._frames()
            # The headers go out with the first frame, so an error before it is still a status.
            first = await anext(frames)
            return EventStream(first, frames, self._stage_headers())
        except ClientLeftError:
            return Response(status_code=CLIENT_LEFT_STATUS)

    def cut(self) -> None:
        """End the answer now, with an error: the process is about to exit."""
        self._give_up("cut")

    async def _watch(self, receive: Receive) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        self._give_up("left")

    def _give_up(self, signal: Literal["left", "cut"]) -> None:
        self._mailbox.put(signal)
        if self._job is not None:
            self._worker.cancel(self._job)

    async def _whole(self) -> dict[str, Any]:
        folds = [Fold() for _ in self._admission.prompts]
        async with contextlib.aclosing(self._counted_steps()) as steps:
            async for step in steps:
                match step:
                    case Grew():
                        folds[step.index].add(step.deltas)
                    case Closed():
                        folds[step.index].finish_reason = step.reason
        return self._wire.whole(folds, self._totals)

    async def _frames(self) -> AsyncGenerator[bytes, None]:
        begun = False
        try:
            async with contextlib.aclosing(self._counted_steps()) as steps:
                async for step in steps:
                    for data in self._frames_of(step):
                        begun = True
                        yield data
            if self._admission.include_usage:
                yield frame(self._wire.usage(self._totals))
        except ApiError as error:
            if not begun:
                raise
            yield error_frame(error)
        except ClientLeftError:
            if not begun:
                raise
        # A stream that only stops would be taken for a complete answer.
        except Exception:
            if not begun:
                raise
            logger.exception("a stream failed")
            yield error_frame(server_error("The server failed on this request."))
        yield DONE

    def _frames_of(self, step: Step) -> list[bytes]:
        match step:
            case Silence():
                return [PING]
            case Opened():
                return [frame(chunk) for chunk in self._wire.opening(step.index)]
            case Grew():
                return [frame(chunk) for chunk in self._wire.chunks(step.index, step.deltas)]
            case Closed():
                totals = self._totals if step.is_last else None
                return [frame(self._wire.closing(step.index, step.reason, totals))]

    async def _counted_steps(self) -> AsyncGenerator[Step, None]:
        """`_steps`, with the engine freed and the outcome counted once, however it ends."""
        outcome = ("cancelled", CLIENT_LEFT_STATUS)
        self._service.active.add(self)
        try:
            async with contextlib.aclosing(self._steps()) as steps:
                async for step in steps:
                    yield step
            outcome = (self._reason, 200)
        except ApiError as error:
            outcome = ("error", error.status)
            raise
        finally:
            if self._job is not None:
                self._worker.cancel(self._job)
            if self._watcher is not None:
                self._watcher.cancel()
            self._service.released(self)
            self._metrics.answered(self._endpoint, *outcome)

    async def _steps(self) -> AsyncGenerator[Step, None]:
        last_index = len(self._admission.prompts) - 1
        for index, prompt in enumerate(self._admission.prompts):
            reader = new_reader(self._tokenizer, self._admission, prompt)
            choice = Choice(index, reader, self._admission)
            if prompt.max_new == 0:
                yield Opened(index)
            else:
                self._submit(prompt, index)
                opened = False
                while choice.finish_reason is None:
                    deltas = await self._next_deltas(choice)
                    if deltas is None:
                        yield Silence()
                        continue
                    if not opened:
                        opened = True
                        yield Opened(index)
                    if deltas:
                        yield Grew(index, deltas)
            self._reason = choice.finish_reason or "length"
            if index == last_index:
                self._count_answer()
            yield Closed(index, self._reason, is_last=index == last_index)

    def _submit(self, prompt: Prompt, index: int) -> None:
        job = Job(prompt.token_ids, prompt.max_new, self._admission.stop_ids, self._mailbox.post)
        self._submitted = time.monotonic()
        try:
            # The later prompts of a request were admitted with it: half an answer is worth nothing.
            self._worker.submit(job, admitted=index > 0)
        except QueueFullError:
            raise unavailable(
                f"{self._worker.max_queue} requests wait already; try again soon.",
                "server_overloaded",
                retry_after=1,
            ) from None
        self._job = job

    async def _next_deltas(self, choice: Choice) -> list[Delta] | None:
        """What the next event of the running job shows; None for silence.

        Raises:
            ApiError: the engine failed, or the process is about to exit.
            ClientLeftError: the client is gone.
        """
        while True:
            match await self._mailbox.get(self._service.settings.ping_seconds):
                case None:
                    return None
                case Started(at=at):
                    queued = self._totals.queue_seconds + at - self._submitted
                    self._totals = replace(self._totals, queue_seconds=queued)
                case Tokens() as tokens:
                    return self._grow(choice, tokens)
                case Finished() as finished:
                    if finished.finish == "cancelled" and not choice.complete:
                        raise _shutting_down()
                    return self._finish(choice, finished)
                case Failed(message, caller_fault):
                    raise invalid(message) if caller_fault else server_error(message)
                case "cut":
                    raise _shutting_down()
                case _:
                    raise ClientLeftError

    def _grow(self, choice: Choice, tokens: Tokens) -> list[Delta]:
        before = choice.completion_tokens
        deltas = choice.push(tokens.token_ids)
        if choice.complete and self._job is not None:
            self._worker.cancel(self._job)
        self._count_tokens(choice.completion_tokens - before, tokens.at)
        return deltas

    def _finish(self, choice: Choice, finished: Finished) -> list[Delta]:
        before = choice.completion_tokens
        deltas = choice.finish(finished)
        self._count_tokens(choice.completion_tokens - before, finished.at)
        self._totals = self._totals.plus(choice, finished)
        return deltas

    def _count_tokens(self, count: int, at: float) -> None:
        if count:
            if self._first_token_seen:
                self._metrics.next_tokens(count, at - self._last_token_at)
            else:
                self._metrics.first_token(at - self._arrived)
            self._first_token_seen = True
            self._metrics.tokens_made(count)
        self._last_token_at = at

    def _count_answer(self) -> None:
        self._metrics.prompt_read(self._totals.prompt_tokens)
        self._metrics.stages(
            queue=self._totals.queue_seconds,
            prefill=self._totals.prefill_seconds,
            decode=self._totals.decode_seconds,
            whole=self._last_token_at - self._arrived,
        )

    def _stage_headers(self) -> dict[str, str]:
        stages = {
            "queue": self._totals.queue_seconds,
            "prefill": self._totals.prefill_seconds,
            "decode": self._totals.decode_seconds,
        }
        shown = [f"{name};dur={value * 1000:.1f}" for name, value in stages.items() if value]
        return {"server-timing": ", ".join(shown)} if shown else {}


def _shutting_down() -> ApiError:
    return unavailable("The server is shutting down; the answer was cut.", "server_draining", 5)
