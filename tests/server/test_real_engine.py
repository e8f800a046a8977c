"""The whole server around the real Rust engine and the embedded model: one thread, real text, real cancelling."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import openai
import pytest

from models import EMBEDDED, EMBEDDED_W4A16
from server.loading import ModelLoader
from server.settings import Settings
from tests.server.live_server import Live, content_of, eventually, payloads

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

HI: Any = [{"role": "user", "content": "Hello!"}]
CONTEXT = 512


@pytest.fixture(scope="module")
def real() -> Iterator[Live]:
    """A server on the embedded model, loaded once."""
    settings = Settings(model=(str(EMBEDDED),), context=CONTEXT)
    with contextlib.closing(Live(settings, loader=ModelLoader(settings))) as live:
        yield live.wait_until_ready()


@pytest.mark.parametrize("asked", [None, False, True], ids=["default", "fast", "exact"])
@pytest.mark.parametrize("model", [EMBEDDED, EMBEDDED_W4A16], ids=["bf16", "w4a16"])
def test_quantized_weights_are_served_fast_and_others_exactly_unless_asked_otherwise(
    model: Path, asked: bool | None
) -> None:
    packed = model == EMBEDDED_W4A16
    fast = packed if asked is None else not asked
    settings = Settings(model=(str(model),), context=CONTEXT, exact=asked)
    with contextlib.closing(Live(settings, loader=ModelLoader(settings))) as live:
        live.wait_until_ready()
        engine = live.http.get("/v1/engine").json()
        assert engine["weight_format"] == ("int4" if packed and fast else "bfloat16")
        assert ("instructions" in engine) == fast
        body = {"messages": [{"role": "user", "content": "What is a ring cache?"}]}
        answer = live.http.post("/v1/chat/completions", json=body).json()
        assert "ring cache" in answer["choices"][0]["message"]["content"].lower()


def test_the_engine_says_what_it_is(real: Live) -> None:
    engine = real.http.get("/v1/engine").json()
    assert (engine["status"], engine["device"]) == ("ok", "cpu")
    assert engine["layout"]["context"] == CONTEXT
    assert engine["thread"]["name"] == "torchtpu-rs-engine"
    assert {"torch", "rustc", "python", "crate"} <= engine["build"].keys()
    assert engine["load_seconds"] > 0
    assert engine["warmup_seconds"] > 0


def test_an_answer_is_text_with_counts_and_the_engines_own_times(real: Live) -> None:
    answer = real.chat("Hello!", max_tokens=40).json()
    choice = answer["choices"][0]
    assert choice["message"]["content"].strip()
    assert "<" not in choice["message"]["content"]
    timings = answer["timings"]
    assert timings["prompt_n"] == answer["usage"]["prompt_tokens"]
    assert timings["predicted_n"] == answer["usage"]["completion_tokens"] <= 40
    assert timings["prompt_ms"] > 0
    assert timings["predicted_per_second"] > 0


def test_stream_and_whole_and_repeated_answers_are_equal(real: Live) -> None:
    whole = real.chat("Hello!", max_tokens=30).json()
    for _ in range(2):
        chunks = payloads(
            real.chat(
                "Hello!", max_tokens=30, stream=True, stream_options={"include_usage": True}
            ).text
        )
        assert content_of(chunks) == whole["choices"][0]["message"]["content"]
        assert chunks[-1]["usage"] == whole["usage"]


def test_a_limit_is_exact(real: Live) -> None:
    answer = real.complete("Once upon", max_tokens=3, ignore_eos=True).json()
    assert answer["usage"]["completion_tokens"] == 3
    assert answer["choices"][0]["finish_reason"] == "length"


def test_the_openai_client_streams_from_it(real: Live) -> None:
    with openai.OpenAI(base_url=f"{real.url}/v1", api_key="any") as client:
        stream = client.chat.completions.create(
            model=EMBEDDED.name, messages=HI, stream=True, max_tokens=20
        )
        assert "".join(c.choices[0].delta.content or "" for c in stream)


def test_a_client_that_leaves_frees_the_engine(real: Live) -> None:
    def cancelled() -> float:
        return real.metric("torchtpu_requests_total", finish_reason="cancelled")

    before = cancelled()
    connection = real.open_chat(stream=True, ignore_eos=True)
    while b'"content":"' not in connection.recv(65536):
        pass
    connection.close()
    eventually(lambda: cancelled() == before + 1, "the cancel is counted")
    worker = real.service.worker
    eventually(lambda: worker.running == 0, "the engine is free")
    assert real.chat("Hello!", max_tokens=5).status_code == 200


def test_what_the_engine_cannot_take_is_refused_before_it(real: Live) -> None:
    assert real.complete([10_000_000]).status_code == 400
    assert real.complete([5] * (CONTEXT + 1)).json()["error"]["code"] == "context_length_exceeded"
    assert real.chat("Hello!", max_tokens=5).status_code == 200
