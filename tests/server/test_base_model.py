"""A model without a chat template, here in a GGUF file: it continues texts, and says that it knows no conversation."""

from __future__ import annotations

import contextlib
import json
from typing import TYPE_CHECKING

import pytest
from typer.testing import CliRunner

from server import cli, doctor
from server.settings import Settings
from tests.fakes import FakeEngine
from tests.server.live_server import Live, assert_openai_error

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

BOS = 2


@pytest.fixture(scope="module")
def base(gguf_file: Path) -> Iterator[Live]:
    engine = FakeEngine(vocab_size=1200)
    with contextlib.closing(Live(Settings(model=(str(gguf_file),)), engine)) as made:
        yield made.wait_until_ready()


def test_a_completion_is_answered_with_one_bos_before_the_prompt(base: Live) -> None:
    base.engine.calls.clear()
    base.script(" upon a time\n\n")
    answer = base.complete("Once").json()
    assert answer["choices"][0]["text"] == " upon a time\n\n"
    assert answer["model"] == "tiny-Q4_K_M"
    assert base.engine.calls[0].token_ids == (BOS, *base.ids("Once"))


def test_a_conversation_is_refused_with_what_to_do(base: Live) -> None:
    message = assert_openai_error(base.chat(), 400, param="messages")
    assert "no chat template" in message
    assert "/v1/completions" in message
    streamed = base.chat(stream=True)
    assert assert_openai_error(streamed, 400, param="messages") == message


def test_the_command_line_says_it_too(gguf_file: Path, tmp_path: Path) -> None:
    talk = tmp_path / "talk.json"
    talk.write_text(json.dumps([{"role": "user", "content": "hi"}]), "utf-8")
    run = CliRunner().invoke(cli.app, ["render", str(talk), "--model", str(gguf_file)])
    assert run.exit_code == 1
    assert "no chat template" in run.output


def test_doctor_looks_a_gguf_file_over(gguf_file: Path) -> None:
    models = [str(gguf_file)]
    check = doctor._checkpoint(models, doctor._places(models))
    assert check["status"] == "ok"
    assert check["architecture"] == "gemma3"
    assert check["weight_bytes"] == gguf_file.stat().st_size
    assert check["chat_template"] is False
    assert "no chat template" in check["message"]


def test_doctor_names_the_key_of_a_broken_file(tmp_path: Path) -> None:
    file = tmp_path / "m.gguf"
    file.write_bytes(b"GGUF" + bytes(8))
    check = doctor._checkpoint([str(file)], doctor._places([str(file)]))
    assert check["status"] == "failed"
    assert str(file) in check["message"]
