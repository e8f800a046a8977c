"""Clients that leave: streamed or not, queued or running, and what is left behind (nothing)."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import pytest

from tests.fakes import Gate
from tests.server.live_server import eventually

if TYPE_CHECKING:
    from tests.server.live_server import Live

pytest_plugins = ["tests.server.http_fixtures"]


def cancelled(live: Live) -> float:
    return live.metric("torchtpu_requests_total", finish_reason="cancelled", status="499")


def assert_idle(live: Live) -> None:
    worker = live.service.worker
    eventually(lambda: (worker.running, worker.waiting) == (0, 0), "the engine is idle")
    assert live.metric("torchtpu_requests_running") == 0
    assert live.metric("torchtpu_requests_waiting") == 0
    assert live.metric("torchtpu_kv_cache_usage_ratio") == 0
    assert not live.service.active


@pytest.mark.parametrize("stream", [True, False])
def test_a_running_request_stops_before_the_next_step(live: Live, stream: bool) -> None:
    before = cancelled(live)
    gate = Gate()
    live.script("one", gate, "two", "three")
    connection = live.open_chat(stream=stream)
    gate.wait_until_reached()
    connection.close()
    eventually(lambda: cancelled(live) == before + 1, "the cancel is counted")
    gate.open()
    assert_idle(live)
    # "one", then the single token the engine was making when the client left.
    assert live.engine.made == len(live.ids("one")) + 1
    assert live.engine.finishes == ["cancelled"]
    live.script("next")
    assert live.chat().json()["choices"][0]["message"]["content"] == "next"


@pytest.mark.parametrize("stream", [True, False])
def test_a_request_in_prefill_makes_at_most_one_token(live: Live, stream: bool) -> None:
    before = cancelled(live)
    gate = Gate()
    live.script(gate, "one two three")
    connection = live.open_chat(stream=stream)
    gate.wait_until_reached()
    connection.close()
    eventually(lambda: cancelled(live) == before + 1, "the cancel is counted")
    gate.open()
    assert_idle(live)
    assert live.engine.made == 1


@pytest.mark.parametrize("stream", [True, False])
def test_a_queued_request_never_starts(live: Live, stream: bool) -> None:
    before = cancelled(live)
    gate = Gate()
    live.script(gate, "one")
    running = live.open_chat(stream=True)
    gate.wait_until_reached()
    queued = live.open_chat(stream=stream)
    worker = live.service.worker
    eventually(lambda: worker.waiting == 1, "the second waits")
    queued.close()
    eventually(lambda: worker.waiting == 0, "the second has left the queue")
    gate.open()
    while running.recv(65536):
        pass
    running.close()
    assert_idle(live)
    assert len(live.engine.calls) == 1
    assert cancelled(live) == before + 1


def test_a_half_closed_connection_is_a_client_that_left(live: Live) -> None:
    before = cancelled(live)
    gate = Gate()
    live.script("one", gate, "two", "three")
    connection = live.open_chat(stream=True)
    gate.wait_until_reached()
    connection.shutdown(1)
    eventually(lambda: cancelled(live) == before + 1, "the cancel is counted")
    gate.open()
    assert_idle(live)
    connection.close()


def test_a_client_that_leaves_between_two_choices_gets_no_third(live: Live) -> None:
    gate = Gate()
    live.engine.play = lambda ids: [gate, 301] if ids[0] == 300 else [302]
    connection = live.connect(
        "POST", "/v1/completions", b'{"prompt": [[300], [301], [302]], "stream": true}'
    )
    gate.wait_until_reached()
    connection.close()
    eventually(lambda: not live.service.active, "the exchange is over")
    gate.open()
    assert_idle(live)
    assert [call.token_ids for call in live.engine.calls] == [(300,)]


def test_fifty_that_leave_in_a_row_are_counted_and_leave_no_trace(
    live: Live, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    before = cancelled(live)
    for number in range(50):
        gate = Gate()
        live.script("one", gate, "two")
        connection = live.open_chat(stream=bool(number % 2), max_tokens=200)
        gate.wait_until_reached()
        connection.close()
        eventually(lambda n=number: cancelled(live) == before + n + 1, "counted")  # type: ignore[misc]
        gate.open()
    assert_idle(live)
    assert [record for record in caplog.records if record.levelno > logging.INFO] == []
    live.script("short")
    assert live.chat().json()["choices"][0]["message"]["content"] == "short"


def test_a_client_that_leaves_while_it_sends_is_no_error(
    live: Live, caplog: pytest.LogCaptureFixture
) -> None:
    connection = live.connect(
        "POST",
        "/v1/chat/completions",
        b"",
        "content-type: application/json",
        "content-length: 1000",
    )
    connection.sendall(b'{"messages":')
    connection.close()
    assert live.chat().status_code == 200
    assert [record for record in caplog.records if record.levelno >= logging.WARNING] == []


def test_a_slow_reader_holds_up_nobody_and_its_answer_is_whole(live: Live) -> None:
    live.script(*(live.ids("x")[0] for _ in range(200)))
    slow = live.open_chat(stream=True)
    eventually(
        lambda: live.engine.finishes == ["length"] or live.engine.finishes == ["stop"], "made"
    )
    # The slow one has read nothing, and the engine already serves the next.
    assert live.chat().status_code == 200
    data = b""
    while piece := slow.recv(512):
        data += piece
    slow.close()
    assert data.count(b'"content":"x"') == 200
    assert b"data: [DONE]" in data
