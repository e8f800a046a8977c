"""Many clients at once: order, the bound of the queue, and that nobody gets a neighbour's answer."""

from __future__ import annotations

import json
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import httpx

from tests.fakes import Gate
from tests.server.live_server import (
    assert_openai_error,
    content_of,
    eventually,
    payloads,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from tests.fakes import Item
    from tests.server.live_server import Live

pytest_plugins = ["tests.server.http_fixtures"]


def test_a_full_queue_is_503_with_retry_after_and_says_so_at_once(
    serve: Callable[..., Live],
) -> None:
    live = serve(max_queue=1)
    gate = Gate()
    live.script(gate, "one")
    running = live.open_chat()
    gate.wait_until_reached()
    waiting = live.open_chat()
    eventually(lambda: live.service.worker.waiting == 1, "one waits")
    for stream in (True, False):
        response = live.chat(stream=stream)
        assert_openai_error(response, 503, code="server_overloaded")
        assert int(response.headers["retry-after"]) >= 1
    assert live.metric("torchtpu_requests_waiting") == 1
    assert live.metric("torchtpu_requests_running") == 1
    gate.open()
    for connection in (running, waiting):
        data = b""
        while piece := connection.recv(65536):
            data += piece
        assert b'"content":"one"' in data
        connection.close()
    assert live.chat().status_code == 200


def test_requests_are_served_in_the_order_they_came(live: Live) -> None:
    gate = Gate()
    live.engine.play = lambda ids: [gate, ids[-1]]
    worker = live.service.worker
    connections = []
    for number in range(6):
        body = json.dumps({"prompt": [300 + number], "stream": bool(number % 2)}).encode()
        connections.append(live.connect("POST", "/v1/completions", body))
        eventually(lambda n=number: worker.running + worker.waiting == n + 1, "it is queued")  # type: ignore[misc]
    gate.open()
    for connection in connections:
        while connection.recv(65536):
            pass
        connection.close()
    assert [call.token_ids[0] for call in live.engine.calls] == [300, 301, 302, 303, 304, 305]


def test_sixteen_at_once_each_get_their_own_answer(live: Live) -> None:
    """Five rounds, streamed and whole, with refused, broken and dropped requests among them."""

    def echo(ids: Sequence[int]) -> list[Item]:
        # The reply repeats the last words of the prompt, before the end of the user's turn.
        turn = len(ids) - 1 - list(reversed(ids)).index(106)
        return list(ids[turn - 12 : turn])

    live.engine.play = echo
    keys = [f"KEY-{number:04d}-{'abcdefghijklmnop'[number % 16]}" for number in range(80)]
    alone = [live.chat(f"say it {key}").json()["choices"][0]["message"]["content"] for key in keys]
    assert all(key in said for key, said in zip(keys, alone, strict=True))
    barrier = threading.Barrier(16)

    def ask(number: int) -> tuple[str, str]:
        barrier.wait(30)
        said, request_id = "", f"id-{number}"
        headers = {"x-request-id": request_id}
        body = {"messages": [{"role": "user", "content": f"say it {keys[number]}"}]}
        with httpx.Client(base_url=live.url, timeout=60, headers=headers, verify=False) as client:
            if number % 5 == 0:
                bad = b'{"messages": [{"role": "user", "content": "\\ud800"}]}'
                refused = client.post(
                    "/v1/chat/completions",
                    content=bad,
                    headers={"content-type": "application/json"},
                )
                assert refused.status_code == 400
            if number % 7 == 0:
                live.open_chat(stream=True, max_tokens=100).close()
            stream = bool(number % 2)
            answer = client.post("/v1/chat/completions", json={**body, "stream": stream})
            assert answer.headers["x-request-id"] == request_id
            if stream:
                said = content_of(payloads(answer.text))
            else:
                said = answer.json()["choices"][0]["message"]["content"]
        return keys[number], said

    with ThreadPoolExecutor(16) as pool:
        together = list(pool.map(ask, range(80)))
    assert together == list(zip(keys, alone, strict=True))


def test_hundreds_of_requests_leave_nothing_behind(live: Live) -> None:
    """Equal, unique, refused, failing: tables are empty, threads and metric labels as before."""

    def one_of_each(number: int) -> None:
        live.script("ok")
        assert live.complete([300]).status_code == 200
        assert live.complete([300, number % 500]).status_code == 200
        assert live.complete([-1]).status_code == 400
        live.http.get(f"/nothing/{number}")
        live.engine.script = [RuntimeError("lost")]
        assert live.complete([300]).status_code == 500

    def samples() -> int:
        return sum(len(f.samples) for f in live.service.metrics.registry.collect())

    for number in range(20):
        one_of_each(number)
    before = (samples(), threading.active_count())
    for number in range(60):
        one_of_each(number)
    assert (samples(), threading.active_count()) == before
    service = live.service
    assert (len(service.active), service.worker.waiting, service.worker.running) == (0, 0, 0)
