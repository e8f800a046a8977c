"""Who may call: browsers' origins, preflights, the API key."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

import pytest

from server.settings import Settings
from tests.fakes import FakeEngine
from tests.server.live_server import SAY_HI, Live, assert_openai_error

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    import httpx

pytest_plugins = ["tests.server.http_fixtures"]

KEY = "s3cret-ü"
PREFLIGHT = {
    "access-control-request-method": "POST",
    "access-control-request-headers": "authorization,content-type,x-request-id",
}


@pytest.fixture(scope="module")
def locked(model_folder: Path, vocab_size: int) -> Iterator[Live]:
    """A server with a key and one named origin, started once."""
    settings = Settings.model_validate(
        {"model": [str(model_folder)], "api_key": KEY, "cors_origin": ["https://chat.example"]}
    )
    with contextlib.closing(Live(settings, FakeEngine(vocab_size=vocab_size))) as live:
        live.wait_until_ready().script("Hello")
        yield live


def post(live: Live, **headers: str) -> httpx.Response:
    body = {"messages": SAY_HI}
    # httpx takes text headers as ASCII only.
    encoded = {name.replace("_", "-").encode(): value.encode() for name, value in headers.items()}
    return live.http.post("/v1/chat/completions", json=body, headers=encoded)


@pytest.mark.parametrize(
    "origin",
    ["http://localhost:3000", "http://127.0.0.1", "https://[::1]:8443", "https://chat.example"],
)
def test_a_preflight_passes_without_a_key(locked: Live, origin: str) -> None:
    response = locked.http.options("/v1/chat/completions", headers={"origin": origin, **PREFLIGHT})
    assert response.status_code == 204
    headers = response.headers
    assert headers["access-control-allow-origin"] == origin
    assert "POST" in headers["access-control-allow-methods"]
    assert headers["access-control-allow-headers"] == PREFLIGHT["access-control-request-headers"]
    assert headers["vary"] == "Origin"
    assert "access-control-allow-credentials" not in headers


@pytest.mark.parametrize(
    "origin",
    [
        "https://evil.example",
        "null",
        "http://localhost.evil.example",
        "http://evil.example:80/localhost",
        "http://localhost:3000.evil.example",
        "https://chat.example.evil.example",
    ],
)
def test_a_foreign_origin_gets_no_allow_header(locked: Live, origin: str) -> None:
    for response in (
        locked.http.options("/v1/chat/completions", headers={"origin": origin, **PREFLIGHT}),
        locked.http.get("/health", headers={"origin": origin}),
    ):
        assert "access-control-allow-origin" not in response.headers
        assert response.headers["vary"] == "Origin"


def test_a_star_allows_every_origin_without_credentials(serve: Callable[..., Live]) -> None:
    live = serve(cors_origin=("*",))
    response = live.http.get("/health", headers={"origin": "https://any.example"})
    assert response.headers["access-control-allow-origin"] == "https://any.example"
    assert "access-control-allow-credentials" not in response.headers


def test_a_missing_or_wrong_key_is_401_that_a_page_can_read(locked: Live) -> None:
    for headers in (
        {},
        {"authorization": "Bearer wrong"},
        {"authorization": f"Basic {KEY}"},
        {"authorization": "Bearer"},
        {"x_api_key": "wrong"},
    ):
        response = post(locked, origin="http://localhost:3000", **headers)
        assert_openai_error(response, 401, code="invalid_api_key")
        assert response.headers["www-authenticate"] == "Bearer"
        allowed = response.headers["access-control-allow-origin"]
        assert allowed == "http://localhost:3000"
    assert locked.engine.calls == []


@pytest.mark.parametrize(
    "headers",
    [
        {"authorization": f"Bearer {KEY}"},
        {"authorization": f"bearer {KEY}"},
        {"authorization": f"BEARER   {KEY}"},
        {"x_api_key": KEY},
        {"x_api_key": KEY, "authorization": "Bearer other"},
    ],
)
def test_the_key_opens_by_either_header(locked: Live, headers: dict[str, str]) -> None:
    assert post(locked, **headers).status_code == 200


def test_health_is_open_and_everything_else_is_not(locked: Live) -> None:
    for path in ("/", "/health", "/v1/health", "/ready", "/live", "/health/"):
        assert locked.http.get(path).status_code == 200, path
    for path in (
        "/metrics",
        "/v1/metrics",
        "/v1/models",
        "/models",
        "/v1/engine",
        "/engine",
        "//v1//models/",
        "/nothing",
        "/openapi.json",
    ):
        assert locked.http.get(path).status_code == 401, path
    for path in (
        "/v1/chat/completions",
        "/chat/completions",
        "/completions",
        "/tokenize",
        "/detokenize",
        "/v1/chat/completions/render",
    ):
        assert locked.http.post(path, json={}).status_code == 401, path


def test_without_a_key_setting_any_key_is_fine(live: Live) -> None:
    assert post(live, authorization="Bearer anything").status_code == 200
