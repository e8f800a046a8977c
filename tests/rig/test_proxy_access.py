"""Who may call the proxy: those with its key, under its own names; and whose key goes where."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from rig.proxy import ANY
from tests.rig.hops import CALLER, OK, UPSTREAM, client, passed_to, raw, say
from tests.server.live_server import assert_openai_error

# -- keys ----------------------------------------------------------------------------------------------


def test_a_caller_without_the_key_gets_no_further() -> None:
    offered: list[dict[str, Any]] = [
        {},
        {"authorization": "Bearer wrong"},
        {"authorization": f"Basic {CALLER}"},
        {"authorization": CALLER},
        {"authorization": f"Bearer {CALLER}x"},
        {"authorization": f"Bearer {UPSTREAM}"},
        {"x-api-key": "wrong"},
        {"authorization": b"Bearer \xff\xfe"},
    ]
    with passed_to(say(OK), caller_key=CALLER, upstream_key=lambda: UPSTREAM) as (hop, served):
        with client(served) as http:
            answers = [http.get("/v1/models", headers=headers) for headers in offered]
        assert hop.heads.empty()
    for answer in answers:
        message = assert_openai_error(answer, 401, code="invalid_api_key")
        assert message.startswith("The proxy expects its API key")
        assert answer.headers["www-authenticate"] == "Bearer"
        assert not any(key in answer.text for key in (CALLER, UPSTREAM))


@pytest.mark.parametrize("name", ["authorization", "x-api-key"])
def test_the_callers_key_is_replaced_by_the_next_hops(name: str) -> None:
    with passed_to(say(OK), caller_key=CALLER, upstream_key=lambda: UPSTREAM) as (hop, served):
        value = f"bearer {CALLER}" if name == "authorization" else CALLER
        with client(served, headers={name: value}) as http:
            assert http.get("/").text == "ok"
        head = hop.head()
    assert head.count(b"authorization: Bearer " + UPSTREAM.encode()) == 1
    assert CALLER.encode() not in head


def test_a_key_for_the_proxy_is_not_passed_to_a_next_hop_without_one() -> None:
    with passed_to(say(OK), caller_key=CALLER) as (hop, served):
        with client(served, headers={"authorization": f"Bearer {CALLER}"}) as http:
            http.get("/")
        assert b"authorization" not in hop.head().lower()


def test_a_preflight_needs_no_key() -> None:
    with passed_to(say(OK), caller_key=CALLER) as (_, served), client(served) as http:
        answer = http.options("/v1/models", headers={"origin": "http://localhost:3000"})
        assert answer.status_code == 200


def test_keys_are_in_no_log(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    with passed_to(say(OK), caller_key=CALLER, upstream_key=lambda: UPSTREAM) as (_, served):
        with client(served, headers={"authorization": f"Bearer {CALLER}"}) as http:
            http.get("/")
        served_port = str(served.port)
    assert served_port in caplog.text
    assert CALLER not in caplog.text
    assert UPSTREAM not in caplog.text


# -- names ---------------------------------------------------------------------------------------------


def test_names_that_are_not_its_own_are_refused() -> None:
    strange = [
        ("host", "evil.example"),
        ("host", "evil.example:8015"),
        ("host", "127.0.0.1.evil.example"),
        ("host", "localhost@evil.example"),
        ("host", ""),
        ("host", "127.0.0.2"),
        ("origin", "http://evil.example"),
        ("origin", "https://localhost.evil.example"),
        ("origin", "null"),
        ("origin", "file://localhost"),
        ("origin", ""),
    ]
    with passed_to(say(OK), names={"rig.lan"}) as (hop, served), client(served) as http:
        for header, value in strange:
            answer = http.post("/v1/models", headers={header: value})
            message = assert_openai_error(answer, 403, code=f"{header}_not_allowed")
            assert "127.0.0.1, [::1], localhost, rig.lan" in message
        assert hop.heads.empty()


def test_two_origins_are_none_of_its_own() -> None:
    with passed_to(say(OK)) as (hop, served):
        origins = b"origin: http://localhost\r\norigin: http://evil.example\r\n"
        answer = raw(
            served, b"GET / HTTP/1.1\r\nhost: localhost\r\n%sconnection: close\r\n\r\n" % origins
        )
        assert answer.startswith(b"HTTP/1.1 403")
        assert hop.heads.empty()


def test_its_own_names_are_known_in_every_form() -> None:
    with passed_to(say(OK), names={"Rig.lan"}) as (_, served), client(served) as http:
        for host in ("127.0.0.1:8015", "LocalHost", "[::1]:1", "rig.lan:80"):
            headers = {"host": host, "origin": f"https://{host}"}
            assert http.get("/", headers=headers).text == "ok"


def test_who_asks_for_a_key_may_be_called_by_any_name() -> None:
    headers = {"host": "rig.example", "origin": "http://else.example", "x-api-key": CALLER}
    with passed_to(say(OK), names={ANY}, caller_key=CALLER) as (_, served):
        with client(served, headers=headers) as http:
            assert http.get("/").text == "ok"
        with client(served, headers={"host": "rig.example"}) as http:
            assert_openai_error(http.get("/"), 401, code="invalid_api_key")
