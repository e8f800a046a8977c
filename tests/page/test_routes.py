"""What the server gives a browser at `/`, to whom, and under which rules; no browser takes part."""

from __future__ import annotations

import base64
import contextlib
import hashlib
import re
import sys
from typing import TYPE_CHECKING

import httpx
import pytest
from typer.testing import CliRunner

import page
from models import EMBEDDED
from server import cli, serving
from server.settings import Settings
from tests.fakes import FakeEngine
from tests.server.live_server import Live, assert_openai_error

if TYPE_CHECKING:
    from collections.abc import Iterator

BROWSER = {"accept": "text/html,application/xhtml+xml,application/xml;q=0.9,*/*;q=0.8"}
MAX_BYTES = 150_000


@pytest.fixture(scope="module")
def locked() -> Iterator[Live]:
    """A server that asks for a key."""
    settings = Settings.model_validate({"model": [str(EMBEDDED)], "api_key": "secret"})
    with contextlib.closing(Live(settings, FakeEngine())) as live:
        yield live.wait_until_ready()


def test_a_browser_gets_the_page_and_other_clients_what_they_got_before(locked: Live) -> None:
    shown = locked.http.get("/", headers=BROWSER)
    assert (shown.status_code, shown.headers["content-type"]) == (200, "text/html; charset=utf-8")
    assert shown.content == page.front()[0]
    for headers in ({}, {"accept": "application/json"}):
        told = locked.http.get("/", headers=headers)
        assert told.json() == {"name": "torchtpu-rs", "status": "ok"}
    assert_openai_error(
        locked.http.post("/", headers=BROWSER | {"authorization": "Bearer secret"}),
        405,
        code="method_not_allowed",
    )


def test_every_file_comes_without_the_key_and_nothing_else_does(locked: Live) -> None:
    for address, file in page.pages().items():
        answer = locked.http.get(address, headers=BROWSER)
        assert answer.content == (page.front()[0] if address == "/" else file.read_bytes()), address
        assert "content-encoding" not in answer.headers
        assert answer.headers["x-content-type-options"] == "nosniff"
    for address in (
        "/page/",
        "/page/README.md",
        "/page/__init__.py",
        "/page/page.css",
        "/page/../v1/engine",
    ):
        assert locked.http.get(address).status_code == 401, address


def test_the_policy_allows_the_servers_own_files_and_what_the_front_has_inside(
    locked: Live,
) -> None:
    headers = locked.http.get("/", headers=BROWSER).headers
    html = page.front()[0].decode()

    def hash_of(begin: str, end: str) -> str:
        inside = html.split(begin)[1].split(end)[0]
        return f"'sha256-{base64.b64encode(hashlib.sha256(inside.encode()).digest()).decode()}'"

    policy = dict(
        part.strip().partition(" ")[::2] for part in headers["content-security-policy"].split(";")
    )
    assert policy == {
        "default-src": "'none'",
        "script-src": f"'self' {hash_of('<script>', '</script>')}",
        "style-src": f"'self' {hash_of('<style>', '</style>')}",
        "connect-src": "'self'",
        "img-src": "'self' data:",
        "base-uri": "'none'",
        "form-action": "'none'",
        "frame-ancestors": "'none'",
        "require-trusted-types-for": "'script'",
        "trusted-types": "dompurify",
    }
    assert headers["vary"] == "Accept, Origin"


def test_a_file_that_did_not_change_is_not_sent_again(locked: Live) -> None:
    first = locked.http.get("/page/app.js")
    known = {"if-none-match": first.headers["etag"]}
    again = locked.http.get("/page/app.js", headers=known)
    assert (again.status_code, again.content) == (304, b"")
    assert again.headers["etag"] == first.headers["etag"]
    assert locked.http.get("/page/run.js", headers=known).status_code == 200


def test_without_the_page_nothing_of_it_is_there() -> None:
    settings = Settings(model=(str(EMBEDDED),), page=False)
    with contextlib.closing(Live(settings, FakeEngine())) as live:
        assert live.http.get("/", headers=BROWSER).json()["name"] == "torchtpu-rs"
        assert_openai_error(live.http.get("/page/app.js"), 404, code="not_found")


def test_the_command_gives_the_page_unless_told_not_to(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Settings] = []

    def serve(settings: Settings, _console: object) -> int:
        seen.append(settings)
        return 0

    monkeypatch.setattr(serving, "serve", serve)
    monkeypatch.setattr(cli, "_set_up_logging", lambda *_: None)
    for arguments, environment in (([], {}), (["--no-page"], {}), ([], {"TORCHTPU_PAGE": "0"})):
        assert CliRunner().invoke(cli.app, ["serve", *arguments], env=environment).exit_code == 0
    assert [settings.page for settings in seen] == [True, False, False]


def test_the_page_is_small(locked: Live) -> None:
    sizes = {
        address: len(httpx.get(locked.url + address, headers=BROWSER, verify=False).content)
        for address in page.pages()
    }
    sys.stdout.write(f"the page: {sum(sizes.values())} bytes in {len(sizes)} files\n")
    assert sum(sizes.values()) < MAX_BYTES, sizes


def test_no_file_of_ours_names_an_address_elsewhere() -> None:
    files = [file for kind in ("*.html", "*.css", "*.js") for file in page.FOLDER.glob(kind)]
    assert len(files) > 10
    for file in files:
        found = re.findall(r"(?:https?:)?//[\w.-]+\.\w+[^\s\"']*", file.read_text())
        # The names of XML's vocabularies look like addresses and are never asked for.
        assert [name for name in found if "www.w3.org" not in name] == [], file.name


def test_vendored_files_are_the_ones_that_were_published() -> None:
    vendor = page.FOLDER / "vendor"
    listed = [
        line.split() for line in (vendor / "VERSIONS").read_text().splitlines() if line[0] != "#"
    ]
    for name, version, file, digest in listed:
        content = (vendor / file).read_bytes()
        assert hashlib.sha256(content).hexdigest() == digest, file
        assert version.encode() in content[:300]
        assert (vendor / f"LICENSE-{name}").stat().st_size > 500
    scripts = {file.name for file in vendor.glob("*.js")}
    assert scripts == {file for _, _, file, _ in listed}
