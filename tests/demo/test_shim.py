"""The shim in front of the real server: what passes is what was sent, and who leaves stops the server."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import sys
from typing import TYPE_CHECKING, Any

import httpx
import openai
import pytest

import page
from rig.endpoint import counters
from tests.demo.shims import Process, Shim, eventually, raw
from tests.fakes import PATIENCE_SECONDS, Gate
from tests.rig.fleet_world import CALLER, FRONT, Child, free_ports
from tests.server.live_server import SAY_HI, assert_openai_error, content_of, payloads

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from rig.endpoint import Counters
    from tests.rig.served import Served
    from tests.server.live_server import Live

pytest_plugins = ["tests.rig.served", "tests.server.http_fixtures", "tests.server.text_fixtures"]

BROWSER = {"accept": "text/html,application/xhtml+xml"}


@pytest.fixture(scope="module")
def key_file(served: Served, tmp_path_factory: pytest.TempPathFactory) -> str:
    file = tmp_path_factory.mktemp("shim") / "key"
    file.write_text(served.key + "\n")
    return str(file)


@pytest.fixture(scope="module")
def shim(served: Served, key_file: str) -> Iterator[Shim]:
    with Shim("--url", f"{served.url}/v1/", "--api-key-file", key_file) as made:
        yield made


def post(path: str, body: str, *headers: str) -> tuple[str, str, str]:
    lines = (
        "content-type: application/json",
        f"content-length: {len(body.encode())}",
        *headers,
    )
    return "POST", path, "\r\n".join(lines) + "\r\n\r\n" + body


def chat(**fields: Any) -> str:
    return json.dumps({"messages": [{"role": "user", "content": "What is a TPU?"}], **fields})


REQUESTS = {
    "models": ("GET", "/v1/models", "\r\n"),
    "one-model": ("GET", "/v1/models/gemma4-embedded?a=%20b", "\r\n"),
    "engine": ("GET", "/v1/engine", "\r\n"),
    "health": ("GET", "/health", "\r\n"),
    "root": ("GET", "/", "\r\n"),
    "head": ("HEAD", "/health", "\r\n"),
    "head-of-nothing": ("HEAD", "/nothing", "\r\n"),
    "preflight": (
        "OPTIONS",
        "/v1/chat/completions",
        "origin: http://localhost:3000\r\naccess-control-request-method: POST\r\n\r\n",
    ),
    "chat": post("/v1/chat/completions", chat()),
    "stream": post(
        "/v1/chat/completions", chat(stream=True, stream_options={"include_usage": True})
    ),
    "completion": post("/v1/completions", '{"prompt": "The ocean", "max_tokens": 8}'),
    "tokenize": post("/tokenize", '{"prompt": "The ocean"}'),
    "not-json": post("/v1/chat/completions", "{not json"),
    "refused-field": post("/v1/chat/completions", chat(temperature=1)),
    "too-long": post("/v1/completions", json.dumps({"prompt": "ocean " * 9000})),
    "unknown-model": post("/v1/chat/completions", chat(model="another")),
    "not-found": ("GET", "/v1/nothing%2Fhere//x", "\r\n"),
    "wrong-method": ("DELETE", "/v1/models", "\r\n"),
}
# What no two answers have in common.
OWN_HEADERS = (b"date", b"x-request-id", b"openai-processing-ms", b"server-timing")
OWN = (
    rb"(chatcmpl|cmpl)-[0-9a-f]+"
    rb'|"created":\d+'
    rb'|"(queue|prompt|predicted)(_ms|_per_second)":[\d.]+'
)


def answered(url: str, name: str, key: str | None) -> tuple[list[bytes], bytes]:
    """Status line and headers, and the body without its transfer coding; what is random is left out."""
    method, path, rest = REQUESTS[name]
    authorization = f"authorization: Bearer {key}\r\n" if key else ""
    head, _, sent = raw(
        url,
        f"{method} {path} HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n{authorization}{rest}".encode(),
    ).partition(b"\r\n\r\n")
    if b"transfer-encoding: chunked" in head.lower():
        sent = b"".join(_chunks(sent))
    body = re.sub(OWN, b"", sent)
    # Numbers of other lengths have other lengths.
    left_out = (*OWN_HEADERS, b"content-length") if body != sent else OWN_HEADERS
    status, *lines = head.split(b"\r\n")
    # Names of headers may be written large or small.
    pairs = [line.partition(b":") for line in lines if not line.lower().startswith(left_out)]
    return [status, *sorted(name.lower() + colon + value for name, colon, value in pairs)], body


def _chunks(body: bytes) -> Iterator[bytes]:
    while body:
        size, _, body = body.partition(b"\r\n")
        length = int(size, 16)
        yield body[:length]
        body = body[length + 2 :]


@pytest.mark.parametrize("name", REQUESTS)
def test_answers_through_the_shim_are_the_servers_own(
    shim: Shim, served: Served, name: str
) -> None:
    assert answered(shim.url, name, None) == answered(served.url, name, served.key)


def test_openais_client_talks_through_it(shim: Shim) -> None:
    with openai.OpenAI(base_url=f"{shim.url}/v1", api_key="any") as api:
        asked: dict[str, Any] = {"model": "gemma4-embedded", "messages": SAY_HI}
        whole = api.chat.completions.create(**asked).choices[0].message.content
        chunks = api.chat.completions.create(**asked, stream=True)
        assert "".join(one.choices[0].delta.content or "" for one in chunks) == whole
        assert [model.id for model in api.models.list()] == ["gemma4-embedded"]
        with pytest.raises(openai.NotFoundError) as refused:
            api.chat.completions.create(model="another", messages=SAY_HI)  # type: ignore[arg-type]
        assert refused.value.code == "model_not_found"


def test_a_stream_comes_piece_by_piece(live: Live) -> None:
    gate = Gate()
    live.script("one", gate, " two")
    with (
        Shim("--url", live.url) as shim,
        httpx.stream(
            "POST",
            f"{shim.url}/v1/chat/completions",
            json={"messages": SAY_HI, "stream": True},
            timeout=PATIENCE_SECONDS,
        ) as answer,
    ):
        lines = answer.iter_lines()
        while '"content":"one"' not in next(lines):
            pass
        gate.wait_until_reached()
        gate.open()
        assert [line for line in lines if line][-1] == "data: [DONE]"


def counted(served: Served) -> Counters:
    headers = {"authorization": f"Bearer {served.key}"}
    return counters(httpx.get(f"{served.url}/metrics", headers=headers).text)


def test_a_client_that_leaves_after_ten_chunks_stops_the_server_and_is_counted_once(
    shim: Shim, served: Served
) -> None:
    before = counted(served).cancelled
    body = json.loads(chat(stream=True, ignore_eos=True, max_tokens=8000))
    with httpx.stream("POST", f"{shim.url}/v1/chat/completions", json=body) as answer:
        lines = answer.iter_lines()
        for _ in range(10):
            while not next(lines).startswith("data: "):
                pass
    eventually(lambda: counted(served).cancelled == before + 1, "the cancel is counted")
    eventually(
        lambda: (counted(served).running, counted(served).waiting) == (0, 0), "the engine is idle"
    )
    assert counted(served).cancelled == before + 1


@pytest.mark.parametrize(
    "header", ["host: evil.example", "host: localhost\r\norigin: http://evil.example", "x: y"]
)
@pytest.mark.parametrize("path", ["/v1/models", "/shim/status", "/"])
def test_a_web_page_elsewhere_cannot_use_it(shim: Shim, path: str, header: str) -> None:
    answer = raw(shim.url, f"GET {path} HTTP/1.1\r\n{header}\r\nconnection: close\r\n\r\n".encode())
    # Without any Host it is no HTTP/1.1 at all, which h11 says and httptools leaves to the shim.
    refusals = (b"HTTP/1.1 400", b"HTTP/1.1 403") if header == "x: y" else (b"HTTP/1.1 403",)
    assert answer.startswith(refusals)
    assert b"gemma4-embedded" not in answer


@pytest.fixture
def fast() -> Iterator[str]:
    """An endpoint that can keep streams waiting for each other."""
    with Process(sys.executable, "-m", "bench.fast_endpoint") as endpoint:
        yield endpoint.said(r"at (http://\S+)")[1]


def test_two_hundred_streams_are_open_at_once_and_each_is_whole(fast: str) -> None:
    count, pieces = 200, 20

    async def all_of_them(url: str) -> list[bytes]:
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(
            base_url=url, timeout=PATIENCE_SECONDS, limits=limits, verify=False
        ) as http:
            # None of them begins before all have come.
            path = f"/stream?pieces={pieces}&together={count}"
            answers = await asyncio.gather(*(http.get(path) for _ in range(count)))
            return [answer.content for answer in answers]

    with Shim("--url", fast) as shim:
        bodies = asyncio.run(all_of_them(shim.url))
    expected = httpx.get(f"{fast}/stream?pieces={pieces}").content
    without_times = {re.sub(rb'"at":\d+', b"", body) for body in [*bodies, expected]}
    assert len(bodies) == count
    assert len(without_times) == 1
    assert expected.count(b"data: ") == pieces + 1


def test_browsers_get_the_chat_page_and_others_the_server(shim: Shim) -> None:
    shown = shim.ask("/", headers=BROWSER)
    assert (shown.content, shown.headers["content-security-policy"]) == page.front()
    assert shim.ask("/page/app.js").content == (page.FOLDER / "app.js").read_bytes()
    assert shim.ask("/").json()["name"] == "torchtpu-rs"


def test_the_status_says_where_requests_go_and_nothing_of_the_key(
    shim: Shim, served: Served
) -> None:
    assert shim.status() == {
        "upstream": served.url,
        "kind": "url",
        "health": 200,
        **dict.fromkeys(("queued_resource", "zone", "project", "phase", "stage", "error")),
        "stages": [],
    }
    assert served.key not in shim.log
    assert f"requests go to {served.url}" in shim.log


def test_a_fleet_is_used_through_its_router(served: Served, tmp_path: Path) -> None:
    for name, text in (("key", served.key), ("caller-key", CALLER), ("workers", served.url)):
        (tmp_path / name).write_text(text)
    ports = free_ports(3)
    url = f"http://127.0.0.1:{ports[0]}"
    with contextlib.closing(Child("-c", FRONT, str(tmp_path), json.dumps(ports))) as front:
        front.wait_for("the router gives requests to")
        with Shim("--router", url, "--api-key-file", str(tmp_path / "caller-key")) as shim:
            found = shim.status()
            assert (found["kind"], found["upstream"], found["health"]) == ("router", url, 200)
            answer = shim.ask("/v1/chat/completions", "POST", json=json.loads(chat(stream=True)))
            assert "TPU" in content_of(payloads(answer.content))


def test_a_caller_may_bring_a_key_where_the_shim_has_none(served: Served) -> None:
    with Shim("--url", served.url) as shim:
        assert_openai_error(shim.ask("/v1/models"), 401, code="invalid_api_key")
        mine = {"authorization": f"Bearer {served.key}"}
        assert shim.ask("/v1/models", headers=mine).status_code == 200
