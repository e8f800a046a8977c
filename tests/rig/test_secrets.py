"""Secrets are read and written at Secret Manager, and their values are in no text of ours."""

from __future__ import annotations

import base64
from typing import TYPE_CHECKING

import pytest

from rig.google import Google, GoogleError
from rig.secret_manager import Secrets
from tests.rig.fake_tpu import FakeTpu, RefusedError, rest_door, services

if TYPE_CHECKING:
    from collections.abc import Iterator

NAME = "projects/my-project/secrets/rig-key"


class Tokens:
    """One for everything."""

    def token(self, *, fresh: bool = False) -> str:
        return "token"


@pytest.fixture
def tpu() -> FakeTpu:
    return FakeTpu()


@pytest.fixture
def secrets(tpu: FakeTpu, monkeypatch: pytest.MonkeyPatch) -> Iterator[Secrets]:
    with rest_door(tpu) as door, Google(Tokens(), sleep=lambda _: None) as google:
        for key, value in services(door).items():
            monkeypatch.setenv(key, value)
        yield Secrets(google, "my-project")


def test_a_secret_is_made_at_its_first_value_and_read_back(tpu: FakeTpu, secrets: Secrets) -> None:
    assert secrets.read("rig-key") is None
    secrets.write("rig-key", "päss")
    assert secrets.read("rig-key") == "päss"
    assert tpu.project.secrets == {NAME: ["päss"]}


def test_another_value_is_a_version_of_the_same_secret(tpu: FakeTpu, secrets: Secrets) -> None:
    secrets.write("rig-key", "one")
    secrets.write("rig-key", "two")
    assert secrets.read("rig-key") == "two"
    assert tpu.project.secrets == {NAME: ["one", "two"]}


def test_a_secret_that_has_no_value_yet_is_none(tpu: FakeTpu, secrets: Secrets) -> None:
    tpu.project.secrets[NAME] = []
    assert secrets.read("rig-key") is None
    secrets.write("rig-key", "first")
    assert secrets.read("rig-key") == "first"


def test_a_creation_whose_answer_was_lost_is_no_error(tpu: FakeTpu, secrets: Secrets) -> None:
    # The first try to add a version says that there is no secret.
    tpu.lost_answers = 1
    secrets.write("rig-key", "value")
    assert secrets.read("rig-key") == "value"


def test_a_refusal_is_no_missing_secret(tpu: FakeTpu, secrets: Secrets) -> None:
    denied = "Permission 'secretmanager.versions.access' denied"
    tpu.next_answers = [RefusedError(403, "PERMISSION_DENIED", denied)]
    with pytest.raises(GoogleError, match=r"secretmanager.versions.access"):
        secrets.read("rig-key")


def test_an_error_that_quotes_the_value_is_told_without_it(
    secrets: Secrets, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("DEBUG")
    value = "s3cr3t" * 20_000
    with pytest.raises(GoogleError, match=r"Invalid value at 'payload.data': …") as refused:
        secrets.write("rig-key", value)
    told = f"{refused.value!r} {refused.value.__suppress_context__} {caplog.text}"
    assert "s3cr3t" not in told
    assert base64.b64encode(value.encode()).decode()[:40] not in told
