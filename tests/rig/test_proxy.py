"""What passes through the proxy is what was sent, as it comes; a caller that leaves stops the server; and what goes wrong says where."""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import queue
import socket
import threading
from typing import TYPE_CHECKING, Any

import httpx
import openai
import pytest
from starlette.responses import PlainTextResponse
from starlette.routing import Route

from rig import proxy as rig_proxy
from rig.proxy import NoUpstreamError, proxy
from tests.fakes import PATIENCE_SECONDS, Gate
from tests.rig.hops import (
    CALLER,
    OK,
    STREAM,
    UPSTREAM,
    Hop,
    Served,
    chunk,
    client,
    has_left,
    passed_to,
    raw,
    say,
    through,
)
from tests.server.live_server import SAY_HI, assert_openai_error, content_of, eventually, payloads

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tests.server.live_server import Live

pytest_plugins = ["tests.server.http_fixtures", "tests.server.text_fixtures"]

# -- what passes ---------------------------------------------------------------------------------------


def test_method_path_query_and_headers_arrive_as_they_were_sent() -> None:
    target = b"/v1/a%2Fb//c/../d;e=%c3%a9?q=a%20b&q=&flag"
    with passed_to(say(OK)) as (hop, served):
        answer = raw(
            served,
            b"PURGE "
            + target
            + b" HTTP/1.1\r\nhost: localhost:1\r\nX-Two: 1\r\nx-two: 2\r\nAuthorization: Bearer own\r\n"
            b"accept-encoding: br\r\nconnection: close, x-hop\r\nx-hop: 1\r\nkeep-alive: 5\r\nTE: trailers\r\n\r\n",
        )
        head = hop.head()
    lines = head.split(b"\r\n")
    assert lines[0] == b"PURGE " + target + b" HTTP/1.1"
    headers = [line.lower() for line in lines[1:-2]]
    assert headers[0] == b"host: " + hop.url.removeprefix("http://").encode()
    assert headers[1:] == [
        b"x-two: 1",
        b"x-two: 2",
        b"authorization: bearer own",
        b"accept-encoding: br",
    ]
    assert answer.endswith(b"\r\n\r\nok")


def test_answers_come_back_as_they_were_made() -> None:
    packed = gzip.compress(b"x" * 1000)
    made = (
        b"HTTP/1.1 201 Created\r\nset-cookie: a=1\r\nset-cookie: b=2\r\ncontent-encoding: gzip\r\nx-request-id: r1\r\n"
        b"connection: x-private\r\nx-private: 1\r\ncontent-length: %d\r\n\r\n%s"
        % (len(packed), packed)
    )
    with passed_to(say(made)) as (_, served):
        answer = raw(served, b"GET / HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n")
    head, _, body = answer.partition(b"\r\n\r\n")
    assert body == packed
    assert head.startswith(b"HTTP/1.1 201")
    for header in (b"set-cookie: a=1", b"set-cookie: b=2", b"x-request-id: r1"):
        assert header in head
    assert b"x-private" not in head


@pytest.mark.parametrize("status", [b"200 OK", b"404 Not Found"])
def test_a_head_request_has_no_body_and_keeps_its_length(status: bytes) -> None:
    made = b"HTTP/1.1 %s\r\ncontent-type: text/plain\r\ncontent-length: 77\r\n\r\n" % status
    with passed_to(say(made)) as (_, served), client(served) as http:
        answer = http.head("/health")
    assert (answer.headers["content-length"], answer.content) == ("77", b"")


def test_a_path_that_the_next_hop_has_goes_in_front() -> None:
    with Hop(say(OK)) as hop, through(f"{hop.url}/gemma/") as served, client(served) as http:
        http.get("/v1/models?a=1")
        assert hop.head().startswith(b"GET /gemma/v1/models?a=1 HTTP/1.1\r\n")


def test_a_stream_is_passed_on_before_its_next_piece_is_made() -> None:
    gate = Gate()

    def play(connection: socket.socket) -> None:
        connection.sendall(STREAM + chunk(b"data: one\n\n"))
        gate.pass_through()
        connection.sendall(chunk(b"data: two\n\n") + b"0\r\n\r\n")

    with passed_to(play) as (_, served), client(served) as http, http.stream("GET", "/") as answer:
        pieces = answer.iter_raw()
        assert next(pieces) == b"data: one\n\n"
        gate.open()
        assert b"".join(pieces) == b"data: two\n\n"
        assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"


def test_an_upload_is_passed_on_before_its_next_piece_is_sent() -> None:
    seen = threading.Event()
    found: list[bytes] = []

    def play(connection: socket.socket) -> None:
        data = b""
        while b"first" not in data:
            data += connection.recv(100)
        seen.set()
        while not data.endswith(b"0\r\n\r\n"):
            data += connection.recv(100)
        found.append(data)
        connection.sendall(OK)

    def upload() -> Iterator[bytes]:
        yield b"first"
        assert seen.wait(PATIENCE_SECONDS), "the first piece was kept back"
        yield b"second"

    with passed_to(play) as (hop, served), client(served) as http:
        assert http.post("/", content=upload()).text == "ok"
        assert b"transfer-encoding: chunked" in hop.head().lower()
    assert found == [chunk(b"first") + chunk(b"second") + b"0\r\n\r\n"]


def test_a_caller_that_reads_slowly_slows_the_next_hop_down() -> None:
    size, sent = 64 * 2**20, threading.Event()

    def play(connection: socket.socket) -> None:
        connection.sendall(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % size)
        connection.sendall(bytes(size))
        sent.set()

    with passed_to(play) as (_, served), client(served) as http, http.stream("GET", "/") as answer:
        pieces = answer.iter_raw()
        read = len(next(pieces))
        # All of it would be through in a fraction of this.
        assert not sent.wait(1.0), "the proxy took in what nobody reads"
        assert read + sum(map(len, pieces)) == size
        assert sent.wait(PATIENCE_SECONDS)


def test_many_streams_are_open_at_once() -> None:
    count = 150
    together = threading.Barrier(count)

    def play(connection: socket.socket) -> None:
        connection.sendall(STREAM + chunk(b"data: one\n\n"))
        together.wait(PATIENCE_SECONDS)
        connection.sendall(chunk(b"data: two\n\n") + b"0\r\n\r\n")

    async def ask(served: Served) -> list[str]:
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(
            base_url=served.url, timeout=PATIENCE_SECONDS, verify=False, limits=limits
        ) as http:
            answers = await asyncio.gather(*(http.get("/") for _ in range(count)))
            return [answer.text for answer in answers]

    with passed_to(play) as (_, served):
        assert asyncio.run(ask(served)) == ["data: one\n\ndata: two\n\n"] * count


def test_where_requests_go_is_asked_for_each_of_them() -> None:
    with Hop(say(OK)) as first, Hop(say(OK.replace(b"ok", b"no"))) as second:
        places = iter([first.url, second.url])
        keys = iter(["one", "two"])
        app = proxy(lambda: next(places), upstream_key=lambda: next(keys))
        with Served(app) as served, client(served) as http:
            assert [http.get("/").text, http.get("/").text] == ["ok", "no"]
        assert b"authorization: Bearer one" in first.head()
        assert b"authorization: Bearer two" in second.head()


# -- callers that leave --------------------------------------------------------------------------------


def test_a_caller_that_leaves_before_the_answer_closes_the_next_connection() -> None:
    left: queue.SimpleQueue[bool] = queue.SimpleQueue()
    with passed_to(lambda connection: left.put(has_left(connection))) as (hop, served):
        with socket.create_connection(("127.0.0.1", served.port)) as connection:
            connection.sendall(b"GET / HTTP/1.1\r\nhost: localhost\r\n\r\n")
            hop.head()
        assert left.get(timeout=PATIENCE_SECONDS)


def test_a_caller_that_leaves_in_the_middle_of_its_upload_closes_the_next_connection() -> None:
    left: queue.SimpleQueue[bool] = queue.SimpleQueue()

    def play(connection: socket.socket) -> None:
        assert connection.recv(5) == b"begun"
        left.put(has_left(connection))

    with passed_to(play) as (hop, served):
        with socket.create_connection(("127.0.0.1", served.port)) as connection:
            connection.sendall(
                b"POST / HTTP/1.1\r\nhost: localhost\r\ncontent-length: 9\r\n\r\nbegun"
            )
            hop.head()
        assert left.get(timeout=PATIENCE_SECONDS)


@pytest.mark.parametrize("stream", [True, False])
def test_a_caller_that_leaves_stops_the_real_server_and_is_counted_once(
    live: Live, stream: bool
) -> None:
    def cancelled() -> float:
        return live.metric("torchtpu_requests_total", finish_reason="cancelled", status="499")

    before, gate = cancelled(), Gate()
    live.script("one", gate, "two", "three")
    with through(live.url) as served:
        with contextlib.closing(socket.create_connection(("127.0.0.1", served.port))) as connection:
            body = b'{"messages": [{"role": "user", "content": "hi"}], "stream": %s}' % (
                b"true" if stream else b"false"
            )
            connection.sendall(
                b"POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
                b"content-length: %d\r\n\r\n%s" % (len(body), body)
            )
            gate.wait_until_reached()
        eventually(lambda: cancelled() == before + 1, "the cancel is counted")
        gate.open()
        eventually(
            lambda: (live.service.worker.running, live.service.worker.waiting) == (0, 0),
            "the engine is idle",
        )
    # "one", then the single token the engine was making when the caller left.
    assert live.engine.made == len(live.ids("one")) + 1
    assert live.engine.finishes == ["cancelled"]


# -- a real client and a real server -------------------------------------------------------------------


def test_openais_client_talks_through_it(serve: Callable[..., Live]) -> None:
    server = serve(api_key=UPSTREAM)
    server.script("Hello there.")
    with (
        through(server.url, upstream_key=lambda: UPSTREAM, caller_key=CALLER) as served,
        openai.OpenAI(base_url=f"{served.url}/v1", api_key=CALLER) as api,
        openai.OpenAI(base_url=f"{served.url}/v1", api_key="wrong", max_retries=0) as stranger,
    ):
        chat: dict[str, Any] = {"model": "tiny-gemma", "messages": SAY_HI}
        assert api.chat.completions.create(**chat).choices[0].message.content == "Hello there."
        chunks = api.chat.completions.create(**chat, stream=True)
        text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
        assert text == "Hello there."
        with pytest.raises(openai.BadRequestError) as refused:
            api.chat.completions.create(**chat, temperature=1)
        assert refused.value.param == "temperature"
        with pytest.raises(openai.AuthenticationError) as unknown:
            stranger.models.list()
        assert unknown.value.code == "invalid_api_key"


# -- what goes wrong -----------------------------------------------------------------------------------


def test_a_next_hop_that_is_not_there_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
    with through(f"http://{address}", hop="The shim") as served, client(served) as http:
        answer = http.post("/v1/chat/completions", json={})
    message = assert_openai_error(answer, 502, code="upstream_unreachable")
    assert message == f"The shim expected an answer from {address}, found no connection."


def test_a_connection_that_takes_too_long_is_a_504(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rig_proxy, "CONNECT_SECONDS", 0.2)
    with contextlib.ExitStack() as stack:
        full = stack.enter_context(socket.create_server(("127.0.0.1", 0), backlog=0))
        # The system answers no more connections than fit into the backlog.
        for _ in range(4):
            waiting = stack.enter_context(socket.socket())
            waiting.setblocking(False)
            waiting.connect_ex(full.getsockname())
        url = f"http://127.0.0.1:{full.getsockname()[1]}"
        with through(url) as served, client(served) as http:
            assert_openai_error(http.get("/"), 504, code="upstream_timeout")


def test_a_next_hop_that_hangs_up_is_a_502() -> None:
    with passed_to(lambda connection: None) as (_, served), client(served) as http:
        assert_openai_error(http.get("/"), 502, code="upstream_failed")


def test_nowhere_to_go_is_told_in_the_words_of_who_knows() -> None:
    def nowhere() -> str:
        raise NoUpstreamError("No VM serves; run `torchtpu-rig create`.")

    with Served(proxy(nowhere)) as served, client(served) as http:
        answer = http.get("/v1/models")
    assert assert_openai_error(answer, 503, code="no_upstream").startswith("No VM serves")
    assert answer.headers["retry-after"] == "5"


def test_a_stream_that_is_cut_says_so_in_its_last_frame() -> None:
    def play(connection: socket.socket) -> None:
        connection.sendall(STREAM + chunk(b'data: {"choices": []}\n\n'))

    with passed_to(play) as (_, served), client(served) as http:
        *_, last = payloads(http.get("/").text)
    assert last["error"]["code"] == "upstream_failed"
    assert last["error"]["type"] == "server_error"


@pytest.mark.parametrize(
    "cut",
    [
        STREAM + chunk(b'data: {"choices": [{"de'),
        b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 100\r\n\r\n{",
    ],
)
def test_an_answer_cut_in_the_middle_never_looks_whole(cut: bytes) -> None:
    with (
        passed_to(say(cut)) as (_, served),
        client(served) as http,
        pytest.raises(httpx.RemoteProtocolError),
    ):
        http.get("/")


@pytest.mark.parametrize(
    ("made", "status", "text"),
    [
        (b"HTTP/1.1 422 U\r\ncontent-type: text/plain\r\ncontent-length: 7\r\n\r\nmissing", 400, "missing"),
        (b"HTTP/1.1 503 S\r\nretry-after: 7\r\ncontent-length: 0\r\n\r\n", 503, ""),
        (b"HTTP/1.1 502 B\r\ncontent-type: text/html\r\n\r\n<html>", 502, "<html>"),
    ],
)  # fmt: skip
def test_an_error_of_a_hop_in_between_becomes_one_that_clients_read(
    made: bytes, status: int, text: str
) -> None:
    with passed_to(say(made), hop="The shim") as (_, served), client(served) as http:
        answer = http.post("/", json={})
    message = assert_openai_error(answer, status, code="upstream_refused")
    assert message.startswith(f"The hop behind the shim answered {made.split()[1].decode()}: ")
    assert text in message
    assert answer.headers.get("retry-after") == ("7" if status == 503 else None)


def test_of_an_endless_error_page_only_the_beginning_is_read() -> None:
    left = threading.Event()

    def play(connection: socket.socket) -> None:
        connection.sendall(b"HTTP/1.1 502 B\r\ncontent-type: text/html\r\n\r\n")
        try:
            while True:
                connection.sendall(b"<p>" * 1000)
        except ConnectionError:
            left.set()

    with passed_to(play) as (_, served), client(served) as http:
        assert "<p><p>" in assert_openai_error(http.get("/"), 502, code="upstream_refused")
        assert left.wait(PATIENCE_SECONDS), "the connection was left open"


def test_the_servers_own_errors_stay_as_they_are(live: Live) -> None:
    with through(live.url) as served, client(served) as http:
        mine, its = http.post("/v1/nothing", json={}), live.http.post("/v1/nothing", json={})
    assert (mine.status_code, mine.text) == (its.status_code, its.text)


# -- what is answered here -----------------------------------------------------------------------------


def test_paths_that_are_not_passed_are_not_found_and_routes_are_answered_here() -> None:
    here = Route("/shim/status", lambda _: PlainTextResponse("here"))
    options = {"passes": lambda path: path.startswith("/v1/"), "routes": [here]}
    with passed_to(say(OK), caller_key=CALLER, **options) as (hop, served):
        with client(served) as http:
            assert http.get("/shim/status").text == "here"
            assert_openai_error(http.get("/shim/status", headers={"host": "evil"}), 403, code="host_not_allowed")  # fmt: skip
        with client(served, headers={"x-api-key": CALLER}) as http:
            assert http.get("/v1/models").text == "ok"
            assert_openai_error(http.get("/add_worker"), 404, code="not_found")
        assert hop.head().startswith(b"GET /v1/models ")
        assert hop.heads.empty()


def test_a_live_stream_is_the_same_with_and_without_it(live: Live) -> None:
    body = {"messages": SAY_HI, "stream": True, "stream_options": {"include_usage": True}}
    with through(live.url) as served, client(served) as http:
        answer = http.post("/v1/chat/completions", json=body)
    chunks = payloads(answer.text)
    assert content_of(chunks) == "Hello there."
    assert chunks[-1]["usage"]["completion_tokens"] > 0
    assert answer.headers["x-accel-buffering"] == "no"
