"""`torchtpu-rs serve gemma3-270m` as a user meets it: terms shown, real text whole in streams, stop strings, Unicode."""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import httpx
import pytest

from server.loading import ModelLoader
from server.settings import Settings
from tests.real.texts import PROMPTS, cases
from tests.server.live_server import Live, assert_openai_error, payloads

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).parents[2]
NAME = "gemma3-270m"


@pytest.fixture(scope="module")
def real() -> Iterator[Live]:
    settings = Settings(model=(NAME,), context=1024)
    with contextlib.closing(Live(settings, loader=ModelLoader(settings))) as live:
        yield live.wait_until_ready()


def streamed(live: Live, prompt: str, **fields: object) -> tuple[list[str], str | None]:
    """The pieces of a streamed completion and how it finished."""
    chunks = payloads(live.complete(prompt, stream=True, **fields).text)
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    finishes = [choice["finish_reason"] for choice in choices if choice["finish_reason"]]
    return [choice["text"] for choice in choices], finishes[-1] if finishes else None


@pytest.mark.parametrize("name", cases())
def test_a_stream_is_the_whole_answer_in_whole_characters(real: Live, name: str) -> None:
    asked = {"max_tokens": 24, "temperature": 0, "ignore_eos": True}
    whole = real.complete(PROMPTS[name], **asked).json()["choices"][0]
    pieces, finish = streamed(real, PROMPTS[name], **asked)
    assert "".join(pieces) == whole["text"]
    assert finish == whole["finish_reason"] == "length"
    # Half a character at the very end is all that a limit may leave.
    assert "�" not in "".join(pieces)[:-1]


@pytest.mark.parametrize(
    "name",
    ["english", "german", "python", "hebrew", pytest.param("japanese", marks=pytest.mark.short)],
)
def test_a_stop_string_ends_the_answer_before_it_and_no_part_of_it_is_streamed(
    real: Live, name: str
) -> None:
    asked = {"max_tokens": 32, "temperature": 0, "ignore_eos": True}
    text = real.complete(PROMPTS[name], **asked).json()["choices"][0]["text"]
    stop = text[len(text) // 2 :][:5]
    expected = text[: text.index(stop)]
    answer = real.complete(PROMPTS[name], stop=[stop, "never said"], **asked).json()["choices"][0]
    assert (answer["text"], answer["finish_reason"]) == (expected, "stop")
    pieces, finish = streamed(real, PROMPTS[name], stop=stop, **asked)
    assert ("".join(pieces), finish) == (expected, "stop")


def test_the_prompt_gets_one_bos_and_usage_counts_it(real: Live) -> None:
    prompt = PROMPTS["emoji families"]
    usage = real.complete(prompt, max_tokens=1).json()["usage"]
    assert usage["prompt_tokens"] == 1 + len(real.ids(prompt))
    assert usage == real.complete(f"<bos>{prompt}", max_tokens=1).json()["usage"]


def test_it_knows_facts(real: Live) -> None:
    text = real.complete("The capital of Norway is", max_tokens=8).json()["choices"][0]["text"]
    assert "Oslo" in text


def test_a_conversation_is_refused_since_this_is_a_base_model(real: Live) -> None:
    assert "no chat template" in assert_openai_error(real.chat(), 400, param="messages")


def test_the_models_entry_names_it(real: Live) -> None:
    [entry] = real.http.get("/v1/models").json()["data"]
    assert (entry["id"], entry["root"]) == (NAME, NAME)
    assert entry["meta"]["n_vocab"] == 262_144


@pytest.mark.short
def test_the_command_shows_the_terms_and_serves() -> None:
    command = [sys.executable, "-m", "server", "serve", NAME, "--port", "0", "--context", "256"]
    with subprocess.Popen(
        command, cwd=ROOT, stderr=subprocess.PIPE, text=True, env={**os.environ, "NO_COLOR": "1"}
    ) as process:
        assert process.stderr is not None
        try:
            said = ""
            for line in process.stderr:
                said += line
                if "ready in" in line:
                    break
            assert "Gemma Terms of Use found at ai.google.dev/gemma/terms" in said
            address = re.search(r"ready in .* at (http\S+)/v1", said)
            assert address, said
            answer = httpx.post(
                f"{address[1]}/v1/completions",
                json={"prompt": "One, two,", "max_tokens": 4},
                timeout=60,
            )
            assert answer.json()["choices"][0]["text"].strip()
        finally:
            process.terminate()
            process.communicate(timeout=60)
    assert process.returncode == 0
