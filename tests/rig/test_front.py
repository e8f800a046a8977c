"""Two real servers, the real vllm-router and our proxy, each a process of its own: balance, streams, cancels, and what is killed comes back."""

from __future__ import annotations

import concurrent.futures
import contextlib
import os
import signal
import socket
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import openai
import pytest

from rig.front import FrontError, passes, serve_fleet
from rig.router import Router, RouterError, RouterFailedError
from tests.fakes import PATIENCE_SECONDS
from tests.rig.fleet_world import (
    CALLER,
    HI,
    LONG,
    SERVERS_KEY,
    World,
    children_of,
    free_ports,
    is_alive,
)
from tests.server.live_server import assert_openai_error, content_of, eventually, payloads

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rig.endpoint import Counters


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    with contextlib.closing(World(tmp_path_factory.mktemp("fleet"))) as made:
        yield made


# -- serving -------------------------------------------------------------------------------------------


def test_callers_need_the_fronts_key_and_never_see_the_servers(world: World) -> None:
    for headers in ({}, {"authorization": f"Bearer {SERVERS_KEY}"}):
        answer = httpx.get(f"{world.url}/v1/models", headers=headers, verify=False)
        assert_openai_error(answer, 401, code="invalid_api_key")
    assert world.http.get("/v1/models").json()["data"][0]["id"] == "gemma4-embedded"
    health = httpx.get(f"{world.url}/health", verify=False)
    assert (health.status_code, health.json()) == (200, {"status": "ok", "workers": 2})


def test_every_path_of_the_servers_gets_through_with_their_key(world: World) -> None:
    # The router sends on what callers send on some paths and a key of its own on the others.
    assert world.http.get("/v1/engine").json()["object"] == "engine"
    assert "torchtpu_requests_total" in world.http.get("/metrics").text
    assert world.http.post("/v1/tokenize", json={"prompt": "hi"}).json()["count"] > 0
    assert world.http.post("/v1/completions", json={"prompt": "Hi", "max_tokens": 1}).is_success
    assert_openai_error(world.http.post("/v1/nothing", json={}), 404, code="not_found")


def test_the_router_can_be_changed_by_nobody_else(world: World) -> None:
    router = f"http://127.0.0.1:{world.router_port}"
    mine = {"url": "http://127.0.0.1:1"}
    for key in ({}, {"authorization": f"Bearer {CALLER}"}):
        for method, path in (("POST", "/add_worker"), ("POST", "/remove_worker"), ("GET", "/workers")):  # fmt: skip
            answer = httpx.request(
                method, f"{router}{path}", params=mine, headers=key, verify=False
            )
            assert answer.status_code == 401, path
    for path in ("/add_worker", "/workers", "/v1/../add_worker", "/v1/%2e%2e/add_worker", "/"):
        assert not passes(httpx.URL(f"{router}{path}").path), path
        with socket.create_connection(("127.0.0.1", world.port), PATIENCE_SECONDS) as connection:
            connection.sendall(
                f"POST {path} HTTP/1.1\r\nhost: localhost\r\nx-api-key: {CALLER}\r\ncontent-length: 0\r\n\r\n".encode()
            )
            assert connection.recv(100).startswith(b"HTTP/1.1 404"), path


def test_keys_are_in_no_log_no_argument_and_no_environment(world: World) -> None:
    (router,) = children_of(world.front.process)
    for pid in (world.front.process.pid, router):
        for file in ("cmdline", "environ"):
            text = Path(f"/proc/{pid}/{file}").read_bytes()
            assert SERVERS_KEY.encode() not in text
            assert CALLER.encode() not in text
    log = (world.folder / "router.log").read_text()
    assert "vllm_router" in log or "DEBUG" in log
    for text in (log, "".join(world.front.lines)):
        assert SERVERS_KEY not in text
        assert CALLER not in text


def test_eight_requests_at_once_are_spread_over_both(world: World) -> None:
    before = world.answered()
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(lambda _: world.chat(), range(8)))
    assert [answer.status_code for answer in answers] == [200] * 8
    first, second = (now - then for now, then in zip(world.answered(), before, strict=True))
    assert first + second == 8
    # Two random ones are compared each time, and with two replicas these are both.
    assert abs(first - second) <= 2


def test_a_stream_comes_while_it_is_made_and_whole(world: World) -> None:
    with world.http.stream("POST", "/v1/chat/completions", json=LONG) as answer:
        assert answer.status_code == 200
        assert answer.headers["content-type"].startswith("text/event-stream")
        pieces = answer.iter_raw()
        next(pieces)
        # It has begun to arrive, and half a minute of it is still to be made.
        world.busy()
    answer = world.chat(stream=True)
    chunks = payloads(answer.text)
    assert len(chunks) > 10
    assert content_of(chunks) == world.chat().json()["choices"][0]["message"]["content"]


def test_a_caller_that_leaves_stops_its_replica_at_once(world: World) -> None:
    idle = lambda: all((c.running, c.waiting) == (0, 0) for c in counts())  # noqa: E731

    def counts() -> list[Counters]:
        return [server.counts() for server in world.servers]

    eventually(idle, "both are idle")
    before = counts()
    with world.http.stream("POST", "/v1/chat/completions", json=LONG) as answer:
        pieces = answer.iter_raw()
        for _ in range(10):
            next(pieces)
    eventually(
        lambda: sum(c.cancelled for c in counts()) == sum(c.cancelled for c in before) + 1,
        "the cancel is counted",
    )
    eventually(idle, "both are idle")
    made = sum(c.generation_tokens for c in counts()) - sum(c.generation_tokens for c in before)
    assert made < 1000


def test_openais_client_works_through_all_of_it(world: World) -> None:
    with openai.OpenAI(base_url=f"{world.url}/v1", api_key=CALLER) as api:
        chat: Any = {"model": "gemma4-embedded", "messages": HI}
        whole = api.chat.completions.create(**chat).choices[0].message.content
        chunks = api.chat.completions.create(**chat, stream=True)
        assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == whole
        with pytest.raises(openai.BadRequestError, match="missing field `messages`"):
            api.post("/chat/completions", body={}, cast_to=object)
        with pytest.raises(openai.NotFoundError) as refused:
            api.chat.completions.create(model="other", messages=chat["messages"])
        assert refused.value.code == "model_not_found"


# -- what comes and goes -------------------------------------------------------------------------------


def test_servers_that_come_and_go_are_added_and_removed_while_streams_go_on(world: World) -> None:
    first, second = world.servers
    with world.http.stream("POST", "/v1/chat/completions", json=LONG) as answer:
        pieces = answer.iter_raw()
        next(pieces)
        busy = world.busy()
        other = second if busy is first else first
        world.names(other)
        world.front.wait_for(f"{busy.url} removed")
        before = busy.counts().requests
        assert [world.chat(max_tokens=1).status_code for _ in range(4)] == [200] * 4
        assert busy.counts().requests == before
        # Removed, and still at what it had begun.
        assert busy.counts().running == 1
    eventually(lambda: busy.counts().running == 0, "a caller that leaves stops it all the same")
    world.names()
    world.front.wait_for(f"{other.url} removed")
    answer = world.chat()
    assert_openai_error(answer, 503, code="no_upstream")
    assert world.http.get("/health").status_code == 503
    world.names(first, second, "http://127.0.0.1:9")
    for _ in range(2):
        world.front.wait_for(" added; ")
    assert world.http.get("/health").json()["workers"] == 2
    world.names(first, second)


def test_a_replica_that_is_killed_costs_its_own_streams_and_no_other_request(world: World) -> None:
    first, second = world.servers
    # The router is alone with it: nobody tells it who is gone.
    world.names("!")
    world.front.wait_for("could not look for servers, so nothing changes: Google does not say")
    with world.http.stream("POST", "/v1/chat/completions", json=LONG) as answer:
        pieces = answer.iter_text()
        text = next(pieces)
        busy = world.busy()
        busy.child.process.kill()
        # Cut between two frames it ends with one that says so, cut inside of one it has no end.
        with contextlib.suppress(httpx.RemoteProtocolError):
            text += "".join(pieces)
            *_, last = payloads(text)
            assert last["error"]["code"] == "upstream_failed"
    before = world.retries()
    assert [world.chat(max_tokens=4).status_code for _ in range(12)] == [200] * 12
    # After three failures its circuit is open; a request may meet all of them, and is tried five times.
    assert world.retries() - before <= 3

    busy.child.close()
    busy.start()
    busy.child.wait_for("ready in")
    world.names(first, second)
    eventually(
        lambda: world.chat(max_tokens=1).is_success and busy.counts().requests > 0, "it is back"
    )


def test_a_router_that_is_killed_is_told_and_started_again(world: World) -> None:
    (router,) = children_of(world.front.process)
    os.kill(router, signal.SIGKILL)
    line = world.front.wait_for("and is started anew")
    assert "its last words" in line
    world.front.wait_for("the router gives requests to")
    assert world.chat(max_tokens=1).status_code == 200
    assert children_of(world.front.process) != [router]


def test_a_signal_lets_answers_end_a_second_one_does_not_and_no_router_is_left(
    world: World,
) -> None:
    (router,) = children_of(world.front.process)
    with world.http.stream(
        "POST", "/v1/chat/completions", json={"messages": HI, "stream": True}
    ) as answer:
        pieces = answer.iter_text()
        text = next(pieces)
        world.front.process.send_signal(signal.SIGTERM)
        chunks = payloads(text + "".join(pieces))
        assert chunks[-1]["choices"][0]["finish_reason"] == "stop"
    assert world.front.ended() == 0
    assert not is_alive(router)

    world.front.close()
    world.front = world.started()
    (router,) = children_of(world.front.process)
    with world.http.stream("POST", "/v1/chat/completions", json=LONG) as answer:
        pieces = answer.iter_text()
        next(pieces)
        world.front.process.send_signal(signal.SIGINT)
        eventually(lambda: not world.takes_connections(), "nobody new is let in")
        world.front.process.send_signal(signal.SIGINT)
        with pytest.raises(httpx.RemoteProtocolError):
            "".join(pieces)
    assert world.front.ended() == 0
    assert not is_alive(router)
    assert "Traceback" not in "".join(world.front.lines)


def test_a_front_that_is_killed_leaves_no_router(world: World) -> None:
    world.front.close()
    world.front = world.started()
    (router,) = children_of(world.front.process)
    world.front.process.kill()
    world.front.ended()
    eventually(lambda: not is_alive(router), "the router ends with its parent")


# -- what cannot be ------------------------------------------------------------------------------------


def test_an_address_that_others_reach_needs_a_key() -> None:
    with pytest.raises(FrontError, match=r"expected a key for callers with --host 0\.0\.0\.0"):
        serve_fleet(list, None, None, "0.0.0.0", 0, 0, print)


def test_a_port_that_is_taken_is_told(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(FrontError, match=f"127.0.0.1:{port}, found Address already in use"):
            serve_fleet(list, None, None, "127.0.0.1", port, 0, print, log=tmp_path / "log")


@pytest.mark.parametrize("place", [0, 1], ids=["its own", "metrics"])
def test_a_router_without_its_ports_is_told_before_it_starts(tmp_path: Path, place: int) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        ports = free_ports(2)
        ports[place] = taken.getsockname()[1]
        with contextlib.closing(Router(ports[0], "key", tmp_path / "log", ports[1])) as router:
            with pytest.raises(RouterFailedError, match=f"127.0.0.1:{ports[place]}, found Address"):
                router.start(["http://127.0.0.1:9"])
            assert not router.is_running


def test_a_router_that_ends_by_itself_is_told_with_its_last_words(tmp_path: Path) -> None:
    port, metrics_port = free_ports(2)
    with contextlib.closing(Router(port, "key", tmp_path / "log", metrics_port)) as router:
        with pytest.raises(RouterFailedError, match=r"ended with status 1: .*Invalid value"):
            router.start(["no address"])
        assert not router.is_running


def test_without_the_router_installed_it_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(RouterError, match=r"pip install 'torchtpu-rs\[fleet\]'"):
        Router(8020, "key", tmp_path / "log")
