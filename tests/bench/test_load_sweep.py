"""The load protocol against an endpoint whose times are known, and against one that refuses, fails, cuts and stalls."""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING, Any

import pytest

from bench.load import wire
from bench.load.result import Settings
from bench.load.sweep import Running, sweep
from tests.bench.scripted import MODEL, Script, Scripted

if TYPE_CHECKING:
    from bench.load.figures import Level

WORD = json.dumps({"choices": [{"delta": {"content": "word"}}]})


def swept(endpoint: Scripted, heard: list[Running] | None = None, **given: Any) -> list[Level]:
    settings = Settings.model_validate({"parts": ["load"], "warmup": 0, **given})

    async def run() -> list[Level]:
        async with wire.client(endpoint.url, "the-key") as client:
            watch = (lambda _: None) if heard is None else heard.append
            return [level async for level in sweep(client, settings, watch)]

    return asyncio.run(run())


def test_constant_times_are_measured_as_they_are() -> None:
    script = Script(first=0.1, gap=0.01, tokens=21)
    with Scripted(script) as endpoint:
        (level,) = swept(endpoint, concurrency=[4], requests_per_level=8)
    figures = level.figures
    assert (figures.completed, figures.failed, figures.tokens) == (8, 0, 168)
    assert figures.first_token_seconds is not None
    assert figures.piece_gap_seconds is not None
    assert figures.request_tokens_per_second is not None
    # 0.3 s a request, two rounds. What comes late on a busy machine does not come early.
    assert 0.6 <= level.seconds < 2
    assert 0.1 <= figures.first_token_seconds.p50 < 0.25
    assert 0.007 < figures.piece_gap_seconds.p50 < 0.03
    assert 40 < figures.request_tokens_per_second.p50 < 120
    assert figures.tokens_per_second == pytest.approx(168 / level.seconds)
    assert 0 < level.client_cpu < 1
    assert script.most == 4


def test_levels_come_in_order_and_what_warms_up_is_not_counted() -> None:
    script = Script(first=0.01, gap=0, tokens=2)
    heard: list[Running] = []
    with Scripted(script) as endpoint:
        levels = swept(endpoint, heard, concurrency=[1, 3], warmup=2)
    assert [str(level.load) for level in levels] == ["1 caller", "3 callers"]
    # Four a caller and at least eight, besides two of each caller to warm up.
    assert [len(level.samples) for level in levels] == [8, 12]
    assert len(script.asked) == 2 + 8 + 6 + 12
    assert [running.load for running in heard] == [level.load for level in levels]
    assert [len(running.samples) for running in heard] == [8, 12]
    assert sorted(one.number for one in levels[1].samples) == list(range(1, 13))


def test_the_body_streams_with_usage_and_prompts_take_turns() -> None:
    script = Script(first=0, gap=0, tokens=2)
    fields = {"temperature": 0, "max_tokens": 5}
    with Scripted(script) as endpoint:
        swept(
            endpoint,
            concurrency=[1],
            requests_per_level=3,
            prompts=["a", "b"],
            model=MODEL,
            fields=fields,
        )
    assert [body["messages"][0]["content"] for body in script.asked] == ["a", "b", "a"]
    assert script.asked[0] == {
        "model": MODEL,
        "messages": [{"role": "user", "content": "a"}],
        "max_tokens": 5,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }


def test_a_caller_keeps_its_connection() -> None:
    script = Script(first=0, gap=0, tokens=2)
    with Scripted(script) as endpoint:
        swept(endpoint, concurrency=[2], requests_per_level=12)
    assert (len(script.asked), len(script.connections)) == (12, 2)


def test_a_duration_ends_a_level_and_what_runs_then_is_whole() -> None:
    script = Script(first=0.05, gap=0, tokens=2)
    with Scripted(script) as endpoint:
        (level,) = swept(endpoint, concurrency=[2], duration_seconds=0.3)
    assert not level.figures.failures
    assert 2 <= level.figures.completed <= 12
    assert all(one.begun < 0.3 for one in level.samples)
    assert script.lost == 0


def test_without_usage_pieces_are_counted_and_that_is_said() -> None:
    with Scripted(Script(first=0.02, gap=0.005, tokens=6, usage=False)) as endpoint:
        (level,) = swept(endpoint, concurrency=[1], requests_per_level=2)
    assert (level.figures.counted, level.figures.tokens) == ("pieces", 12)
    assert [one.rate for one in level.samples] == [pytest.approx(150, rel=0.7)] * 2


def test_tokens_that_come_together_are_one_piece() -> None:
    with Scripted(Script(first=0.02, gap=0.005, tokens=8, tokens_per_chunk=4)) as endpoint:
        (level,) = swept(endpoint, concurrency=[1], requests_per_level=1)
    assert (len(level.samples[0].pieces), level.figures.tokens_per_piece) == (2, 4)


def test_a_refused_request_is_a_failure_and_the_others_count() -> None:
    script = Script(first=0.01, gap=0, tokens=2, refuse={2: (429, {"retry-after": "0"})})
    with Scripted(script) as endpoint:
        (level,) = swept(endpoint, concurrency=[1], requests_per_level=4)
    assert level.figures.failures == {"expected an answer, found HTTP 429: refused with 429": 1}
    assert (level.figures.completed, level.figures.tokens) == (3, 6)


def test_a_caller_who_was_refused_stays_away_for_as_long_as_the_server_asked() -> None:
    script = Script(first=0, gap=0, tokens=2, refuse={1: (503, {"retry-after": "1"})})
    with Scripted(script) as endpoint:
        (level,) = swept(endpoint, concurrency=[1], requests_per_level=2)
    assert [one.failure is None for one in level.samples] == [False, True]
    assert level.samples[1].begun >= 1


def test_a_server_that_refuses_everything_is_not_asked_on_and_on() -> None:
    script = Script(refuse={0: (429, {})})
    with Scripted(script) as endpoint:
        levels = swept(endpoint, concurrency=[2, 4], duration_seconds=0.4)
    # The second level is not begun; of the first each caller asked every quarter of a second.
    assert [level.figures.completed for level in levels] == [0]
    assert len(script.asked) <= 6


@pytest.mark.parametrize(
    ("frames", "says"),
    [
        ([WORD], "ends with [DONE], found one that was cut"),
        ([WORD, '{"error": {"message": "out of memory"}}', "[DONE]"], "found out of memory"),
        (["[DONE]"], "expected text in answer to"),
        ([WORD, "{half", "[DONE]"], "expected a chunk of a chat completion"),
    ],
)
def test_a_stream_that_is_not_whole_is_a_failure_with_its_reason(
    frames: list[str], says: str
) -> None:
    with Scripted(Script(frames=frames)) as endpoint:
        (level,) = swept(endpoint, concurrency=[1], requests_per_level=1)
    ((reason, count),) = level.figures.failures.items()
    assert (says in reason, count) == (True, 1)


def test_an_answer_that_does_not_come_is_given_up() -> None:
    script = Script(first=60)
    with Scripted(script) as endpoint:
        (level,) = swept(endpoint, concurrency=[1], requests_per_level=1, timeout_seconds=0.2)
    assert level.figures.failures == {"no whole answer within 0.2 s": 1}
    assert level.samples[0].ended >= 0.2


def test_nobody_at_the_port_is_a_failure_with_its_reason() -> None:
    with Scripted() as endpoint:
        pass
    (level,) = swept(endpoint, concurrency=[1], requests_per_level=1)
    ((reason, _),) = level.figures.failures.items()
    assert reason.startswith("ConnectError")


def test_an_open_load_goes_on_asking_a_server_that_is_slow() -> None:
    """One answer of 0.1 s at a time, asked 40 times a second: each waits longer than the one before."""
    script = Script(first=0.1, gap=0, tokens=2, slots=1)
    with Scripted(script) as endpoint:
        (level,) = swept(endpoint, rates=[40], requests_per_level=8)
    (again,) = swept_times(40, 8)
    assert (level.figures.completed, level.load.kind) == (8, "open")
    # Sent when they were due, the same times for the same seed.
    in_order = sorted(level.samples, key=lambda one: one.number)
    assert [one.begun for one in in_order] == [one.begun for one in again]
    assert in_order[-1].begun < 0.6
    assert in_order[-1].pieces[0] > 0.3
    assert level.seconds >= 0.8


def swept_times(rate: float, count: int) -> list[list[Any]]:
    with Scripted(Script(first=0, gap=0, tokens=2)) as endpoint:
        (level,) = swept(endpoint, rates=[rate], requests_per_level=count)
    return [sorted(level.samples, key=lambda one: one.number)]


def test_time_that_this_side_is_late_is_in_the_latency(monkeypatch: pytest.MonkeyPatch) -> None:
    """The event loop is held for 0.3 s while a request is due."""
    whole = wire.stream
    held = False

    async def hold_once(*given: Any) -> Any:
        nonlocal held
        if not held:
            held = True
            import time

            time.sleep(0.3)  # noqa: ASYNC251 - what a busy client does
        return await whole(*given)

    monkeypatch.setattr(wire, "stream", hold_once)
    with Scripted(Script(first=0, gap=0, tokens=2)) as endpoint:
        (level,) = swept(endpoint, rates=[50], requests_per_level=4)
    late = [one for one in level.samples if one.late > 0.1]
    assert late
    assert all(one.pieces[0] >= one.late for one in late)
    assert level.figures.late_seconds == max(one.late for one in level.samples)
