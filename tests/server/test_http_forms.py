"""Paths, methods, bodies and headers that clients really send, and that no refusal is anything but OpenAI's error."""

from __future__ import annotations

import http.client
import json
import re
from typing import TYPE_CHECKING

import pytest

from tests.fakes import PATIENCE_SECONDS
from tests.server.live_server import SAY_HI, assert_openai_error

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.server.live_server import Live

pytest_plugins = ["tests.server.http_fixtures"]

JSON = {"content-type": "application/json"}
GOOD = json.dumps({"messages": SAY_HI}).encode()


@pytest.mark.parametrize(
    "path",
    [
        "/v1/chat/completions",
        "/chat/completions",
        "/v1/chat/completions/",
        "//v1/chat/completions",
        "/v1//chat/completions//",
    ],
)
def test_a_post_reaches_its_route_without_a_redirect(live: Live, path: str) -> None:
    raw = live.send_raw("POST", path, GOOD)
    assert raw.startswith(b"HTTP/1.1 200 OK\r\n"), raw
    assert b"Hello there." in raw


@pytest.mark.parametrize(
    "path",
    ["/", "/health", "/v1/health", "/ready", "/live", "/v1/models", "/metrics", "/v1/engine"],
)
def test_head_is_get_without_a_body(live: Live, path: str) -> None:
    head, get = live.http.head(path), live.http.get(path)
    assert (head.status_code, get.status_code) == (200, 200)
    assert head.content == b""
    assert head.headers["content-type"] == get.headers["content-type"]
    raw = live.send_raw("HEAD", path)
    assert raw.endswith(b"\r\n\r\n")


def test_head_never_runs_the_engine(live: Live) -> None:
    response = live.http.head("/v1/chat/completions")
    assert (response.status_code, response.headers["allow"]) == (405, "POST")
    assert live.engine.calls == []


@pytest.mark.parametrize("path", ["/v1/v1/chat/completions", "/v1/v1/models"])
def test_a_doubled_prefix_gets_a_hint(live: Live, path: str) -> None:
    message = assert_openai_error(live.http.post(path, json={}), 404, code="not_found")
    assert "base URL ends with /v1" in message


@pytest.mark.parametrize("path", ["/nothing", "/v1/embeddings", "/v1/responses", "/x" * 3000])
def test_an_unknown_path_is_404_in_openai_form(live: Live, path: str) -> None:
    assert_openai_error(live.http.post(path, json={}), 404, code="not_found")


def test_a_wrong_method_is_405_and_says_which_is_right(live: Live) -> None:
    for method, path, allowed in [
        ("GET", "/v1/chat/completions", "POST"),
        ("DELETE", "/v1/completions", "POST"),
        ("POST", "/health", "GET"),
        ("OPTIONS", "/v1/completions", "POST"),
        ("PATCH", "/v1/models/tiny-gemma", "GET"),
    ]:
        response = live.http.request(method, path)
        assert_openai_error(response, 405, code="method_not_allowed")
        assert response.headers["allow"] == allowed


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/tokenize"])
@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[1]",
        b'"just a string"',
        b'{"temperature": NaN, "messages": 1}',
        b'{"messages": [{"role": "user", "content": "a\\ud800b"}], "prompt": "\\ud800"}',
        b'{"messages": [{"role": "user", "content": "\xff"}]}',
        b"[" * 5000,
        b'{"max_tokens": ' + b"1" * 5000 + b"}",
    ],
)
@pytest.mark.parametrize("stream", [b"", b' "stream": true,'])
def test_a_body_that_is_no_json_object_is_400(
    live: Live, path: str, body: bytes, stream: bytes
) -> None:
    if stream and body.startswith(b"{") and len(body) > 1:
        body = b"{" + stream + body[1:]
    assert_openai_error(live.http.post(path, content=body, headers=JSON), 400)
    assert live.chat().status_code == 200


@pytest.mark.parametrize("field", ["stop", "model", "user"])
def test_a_lone_surrogate_is_refused_wherever_it_stands(live: Live, field: str) -> None:
    body = b'{"messages": [{"role": "user", "content": "x"}], "%s": "\\udfff"}' % field.encode()
    assert_openai_error(live.http.post("/v1/chat/completions", content=body, headers=JSON), 400)


@pytest.mark.parametrize(
    "content_type",
    [None, "text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x"],
)
def test_a_body_has_to_be_sent_as_json(live: Live, content_type: str | None) -> None:
    headers = {} if content_type is None else {"content-type": content_type}
    response = live.http.post("/v1/chat/completions", content=GOOD, headers=headers)
    assert "content-type: application/json" in assert_openai_error(response, 400)


@pytest.mark.parametrize(
    "content_type",
    [
        "application/json",
        "application/json; charset=utf-8",
        "Application/JSON",
        "application/x+json",
    ],
)
def test_json_goes_by_several_names(live: Live, content_type: str) -> None:
    response = live.http.post(
        "/v1/chat/completions", content=GOOD, headers={"content-type": content_type}
    )
    assert response.status_code == 200


def test_a_body_over_the_limit_is_413_announced_or_not(serve: Callable[..., Live]) -> None:
    live = serve(max_body_bytes=2000)
    big = json.dumps({"messages": [{"role": "user", "content": "x" * 5000}]}).encode()
    for content in (big, iter([big[:3000], big[3000:]])):
        response = live.http.post("/v1/chat/completions", content=content, headers=JSON)
        assert_openai_error(response, 413, code="request_too_large")
    assert live.chat().status_code == 200


def test_a_connection_that_saw_an_error_serves_the_next_request(live: Live) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", live.port, timeout=PATIENCE_SECONDS)
    try:
        # The route refuses the content type and leaves the body unread.
        connection.request("POST", "/v1/chat/completions", b"x" * 100_000)
        first = connection.getresponse()
        assert (first.status, "error" in json.loads(first.read())) == (400, True)
        sock = connection.sock
        connection.request("POST", "/v1/chat/completions", GOOD, JSON)
        second = connection.getresponse()
        assert (second.status, connection.sock) == (200, sock)
        assert json.loads(second.read())["choices"][0]["message"]["content"] == "Hello there."
    finally:
        connection.close()


def test_compression_is_never_applied_to_a_stream(live: Live) -> None:
    raw = live.send_raw(
        "POST",
        "/v1/chat/completions",
        json.dumps({"messages": SAY_HI, "stream": True}).encode(),
        "accept-encoding: gzip, br",
    )
    assert b"content-encoding" not in raw.lower()
    assert b"data: [DONE]" in raw


def test_a_fault_in_a_route_is_a_500_in_openai_form(
    live: Live, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(live.service.unknown_fields, "note", lambda request: 1 / 0)
    response = live.chat()
    message = assert_openai_error(response, 500)
    assert "ZeroDivision" not in message
    assert "ZeroDivisionError" in caplog.text
    assert response.headers["x-should-retry"] == "false"
    assert response.headers["vary"] == "Origin"
    monkeypatch.undo()
    assert live.chat().status_code == 200


def test_the_api_description_names_the_inference_routes(live: Live) -> None:
    document = live.http.get("/openapi.json").json()
    paths, schemas = document["paths"], document["components"]["schemas"]
    assert {"/v1/chat/completions", "/v1/completions", "/v1/models"} <= paths.keys()
    assert "/chat/completions" not in paths
    chat = paths["/v1/chat/completions"]["post"]
    assert chat["responses"]["200"]["content"].keys() == {"application/json", "text/event-stream"}
    assert chat["requestBody"]["content"]["application/json"]["schema"] == {
        "$ref": "#/components/schemas/ChatRequest"
    }
    assert schemas["ChatRequest"]["required"] == ["messages"]
    shapes = schemas["CompletionRequest"]["properties"]["prompt"]["anyOf"]
    assert [shape["type"] for shape in shapes] == ["string", "array", "array", "array"]
    references = re.findall(r'"#/components/schemas/(\w+)"', json.dumps(document))
    assert set(references) <= schemas.keys()
