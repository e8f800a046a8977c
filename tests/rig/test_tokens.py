"""Every way to be signed in gives tokens, and none of them waits, prompts or tells a secret."""

from __future__ import annotations

import json
import os
import shutil
import socket
from http.server import BaseHTTPRequestHandler
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qs

import httpx
import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import rsa
from google.auth import jwt

from rig.google import Google
from rig.tokens import GcloudTokens, MetadataTokens, TokenError, found
from tests.rig.fake_tpu import Door, FakeTpu, metadata_door

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

ACCOUNT = "rig@my-project.iam.gserviceaccount.com"


class TokenEndpoint:
    """oauth2.googleapis.com/token: gives a numbered token for a signed claim or a refresh token that it knows."""

    def __init__(self, public_key: bytes) -> None:
        self.given = 0
        self.good_refresh_tokens = {"refresh"}
        self._public_key = public_key

    def answer(self, form: dict[str, str]) -> tuple[int, dict[str, Any]]:
        if form["grant_type"] == "refresh_token":
            if form["refresh_token"] not in self.good_refresh_tokens:
                return 400, {
                    "error": "invalid_grant",
                    "error_description": "Token has been revoked.",
                }
        else:
            claim = jwt.decode(form["assertion"], certs=self._public_key, verify=False)
            assert claim["iss"] == ACCOUNT
            assert claim["scope"] == "https://www.googleapis.com/auth/cloud-platform"
        self.given += 1
        return 200, {
            "access_token": f"token-{self.given}",
            "expires_in": 3600,
            "token_type": "Bearer",
        }

    def door(self) -> Door:
        endpoint = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                raw = self.rfile.read(int(self.headers["Content-Length"])).decode()
                code, body = endpoint.answer({key: one for key, (one,) in parse_qs(raw).items()})
                out = json.dumps(body).encode()
                self.send_response(code)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(out)))
                self.end_headers()
                self.wfile.write(out)

            def log_message(self, *_: object) -> None:
                pass

        return Door(Handler)


@pytest.fixture(autouse=True)
def _nobody_is_signed_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A home without credentials and a PATH without gcloud."""
    for key in (
        "GOOGLE_OAUTH_ACCESS_TOKEN", "GOOGLE_APPLICATION_CREDENTIALS", "GCE_METADATA_HOST",
        "GOOGLE_CLOUD_QUOTA_PROJECT",
    ):  # fmt: skip
        monkeypatch.delenv(key, raising=False)
    (tmp_path / "bin").mkdir()
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    monkeypatch.setenv("CLOUDSDK_CONFIG", str(tmp_path / "gcloud"))
    (tmp_path / "gcloud").mkdir()


@pytest.fixture(scope="module")
def key() -> rsa.RSAPrivateKey:
    return rsa.generate_private_key(public_exponent=65537, key_size=2048)


@pytest.fixture
def endpoint(key: rsa.RSAPrivateKey) -> TokenEndpoint:
    public = key.public_key().public_bytes(
        serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo
    )
    return TokenEndpoint(public)


@pytest.fixture
def door(endpoint: TokenEndpoint) -> Iterator[Door]:
    with endpoint.door() as opened:
        yield opened


@pytest.fixture
def service_account(
    tmp_path: Path, key: rsa.RSAPrivateKey, door: Door, monkeypatch: pytest.MonkeyPatch
) -> Path:
    """A key file as the console makes it, named in the environment."""
    private = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    file = tmp_path / "key.json"
    content = {
        "type": "service_account", "project_id": "my-project", "private_key_id": "1",
        "private_key": private.decode(), "client_email": ACCOUNT, "client_id": "1",
        "token_uri": f"http://{door.address}/token",
    }  # fmt: skip
    file.write_text(json.dumps(content))
    monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", str(file))
    return file


@pytest.fixture
def _google_is_here(door: Door, monkeypatch: pytest.MonkeyPatch) -> None:
    """A user's sign-in is renewed at one address and no other."""
    address = f"http://{door.address}/token"
    monkeypatch.setattr("google.oauth2.credentials._GOOGLE_OAUTH2_TOKEN_ENDPOINT", address)


def signed_in_user(tmp_path: Path, **changed: str) -> Path:
    """What `gcloud auth application-default login` writes."""
    file = tmp_path / "gcloud" / "application_default_credentials.json"
    content = {
        "type": "authorized_user", "client_id": "1.apps.googleusercontent.com",
        "client_secret": "not-so-secret", "refresh_token": "refresh", "account": "",
        **changed,
    }  # fmt: skip
    file.write_text(json.dumps(content))
    return file


def gcloud(tmp_path: Path, script: str) -> Path:
    """A gcloud whose answers are chosen here, which the real one's cannot be without an account."""
    file = tmp_path / "bin" / "gcloud"
    file.write_text(f"#!/bin/sh\n{script}\n")
    file.chmod(0o755)
    return file


def test_the_environments_token_wins_and_there_is_no_other(
    monkeypatch: pytest.MonkeyPatch, service_account: Path
) -> None:
    assert service_account.is_file()
    monkeypatch.setenv("GOOGLE_OAUTH_ACCESS_TOKEN", "given-secret")
    tokens = found()
    assert tokens.token() == "given-secret"
    with pytest.raises(TokenError, match="set a new one, or unset it and run") as refused:
        tokens.token(fresh=True)
    assert "given-secret" not in str(refused.value)


def test_a_service_accounts_key_signs_for_tokens_that_are_kept_until_another_is_asked_for(
    service_account: Path, endpoint: TokenEndpoint
) -> None:
    assert service_account.is_file()
    tokens = found()
    assert [tokens.token(), tokens.token(), tokens.token(fresh=True), tokens.token()] == [
        "token-1", "token-1", "token-2", "token-2",
    ]  # fmt: skip
    assert endpoint.given == 2


@pytest.mark.usefixtures("_google_is_here")
def test_a_users_sign_in_is_renewed_and_counted_for_its_quota_project(tmp_path: Path) -> None:
    signed_in_user(tmp_path, quota_project_id="mine", account="me@example.com")
    seen: list[httpx.Request] = []

    def service(request: httpx.Request) -> httpx.Response:
        seen.append(request)
        return httpx.Response(200, json={})

    with Google(found(), transport=httpx.MockTransport(service)) as google:
        assert google.who == "me@example.com (application default credentials)"
        google.call("GET", "tpu", "v2alpha1/x")
    assert seen[0].headers["authorization"] == "Bearer token-1"
    assert seen[0].headers["x-goog-user-project"] == "mine"


@pytest.mark.usefixtures("_google_is_here")
def test_a_sign_in_that_was_revoked_says_how_to_sign_in_again(
    tmp_path: Path, endpoint: TokenEndpoint
) -> None:
    signed_in_user(tmp_path)
    endpoint.good_refresh_tokens.clear()
    with pytest.raises(TokenError, match="gcloud auth application-default login") as refused:
        found().token()
    assert "invalid_grant" in str(refused.value)
    assert "not-so-secret" not in str(refused.value)


@pytest.mark.parametrize(
    "content", [None, "{", '{"type": "elsewhere"}', '{"type": "service_account"}']
)
def test_a_key_file_that_is_none_is_an_error_that_names_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: str | None
) -> None:
    file = tmp_path / "key.json"
    if content is not None:
        file.write_text(content)
    monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", str(file))
    with pytest.raises(TokenError, match=f"expected credentials in {file}, found "):
        found()


def test_gclouds_account_is_asked_where_there_are_no_application_default_credentials(
    tmp_path: Path,
) -> None:
    gcloud(
        tmp_path,
        'echo "$*" >> "$0.calls"\n'
        'case "$*" in\n'
        '  "auth print-access-token") echo from-gcloud ;;\n'
        '  "config config-helper --force-auth-refresh --format=value(credential.access_token)") echo another ;;\n'
        "  *) echo wrong >&2; exit 2 ;;\n"
        "esac",
    )
    tokens = found()
    assert [tokens.token(), tokens.token(), tokens.token(fresh=True), tokens.token()] == [
        "from-gcloud", "from-gcloud", "another", "another",
    ]  # fmt: skip
    assert len((tmp_path / "bin" / "gcloud.calls").read_text().splitlines()) == 2


def test_a_gcloud_that_fails_or_hangs_is_told_in_its_own_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gcloud(tmp_path, "echo a-secret; echo 'ERROR: no active account' >&2; exit 1")
    with pytest.raises(TokenError, match=r"ERROR: no active account; run `gcloud auth") as refused:
        found()
    assert "a-secret" not in str(refused.value)
    monkeypatch.setattr("rig.tokens.GCLOUD_SECONDS", 0.2)
    gcloud(tmp_path, "exec /bin/sleep 30")
    with pytest.raises(TokenError, match="found TimeoutExpired"):
        found()
    gcloud(tmp_path, "exit 0")
    with pytest.raises(TokenError, match="found: status 0"):
        found()


REAL_GCLOUD = shutil.which("gcloud")


@pytest.mark.skipif(not REAL_GCLOUD, reason="gcloud is not installed")
def test_the_real_gcloud_understands_both_questions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert REAL_GCLOUD
    monkeypatch.setenv("PATH", os.defpath)
    monkeypatch.setenv("CLOUDSDK_CORE_DISABLE_USAGE_REPORTING", "true")
    tokens = GcloudTokens(REAL_GCLOUD)
    for fresh in (False, True):
        with pytest.raises(
            TokenError, match="You do not currently have an active account selected"
        ):
            tokens.token(fresh=fresh)
    file = tmp_path / "token"
    file.write_text("from-a-file")
    monkeypatch.setenv("CLOUDSDK_AUTH_ACCESS_TOKEN_FILE", str(file))
    assert tokens.token() == "from-a-file"


def test_a_vms_own_account_is_asked_until_its_token_is_about_to_end() -> None:
    fake, now = FakeTpu(), [0.0]
    with metadata_door(fake, "node", {}) as door, pytest.MonkeyPatch.context() as environment:
        environment.setenv("GCE_METADATA_HOST", door.address)
        tokens = MetadataTokens(clock=lambda: now[0])
        first = tokens.token()
        assert tokens.token() == first
        assert tokens.token(fresh=True) != first
        second = tokens.token()
        now[0] = 3590.0
        assert tokens.token() not in {first, second}
        fake.vm_has_account = False
        with pytest.raises(TokenError, match="set SERVICE_ACCOUNT"):
            tokens.token(fresh=True)


def test_on_a_vm_without_sign_in_its_own_account_asks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with metadata_door(FakeTpu(), "node", {}) as door:
        monkeypatch.setenv("GCE_METADATA_HOST", door.address)
        assert isinstance(found(), MetadataTokens)
        gcloud(tmp_path, "exit 1")
        assert isinstance(found(), MetadataTokens)


def test_a_metadata_server_that_is_not_there_is_an_error_that_names_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        monkeypatch.setenv("GCE_METADATA_HOST", address)
        with pytest.raises(TokenError, match=f"the metadata server {address}"):
            MetadataTokens().token()


def test_nobody_signed_in_is_told_both_ways_at_once_and_no_metadata_server_is_asked(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("rig.tokens._on_google", lambda: False)
    monkeypatch.setattr(socket.socket, "connect", lambda *_: pytest.fail("it asked a server"))
    with pytest.raises(TokenError, match=r"application-default login`, or `gcloud auth login`"):
        found()
