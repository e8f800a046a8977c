"""The published protocol, measured on the real server; servers without timings; and endpoints that cannot be measured, told apart."""

from __future__ import annotations

import json
import re
import socket
from typing import TYPE_CHECKING, Any

import pytest

from bench.load import published
from bench.load.published import Benchmark, Request, Stream
from bench.load.wire import BenchmarkError, RefusedError, UnansweredError
from tests.bench.scripted import Script, Scripted
from tests.rig.fake_http import Door, Handler

if TYPE_CHECKING:
    from tests.rig.served import Served

pytest_plugins = ["tests.rig.served"]

PUBLISHED = [
    (83, 0.088, 6.651, 12.33, 6.83),
    (83, 0.086, 6.720, 12.20, 6.89),
    (83, 0.086, 6.734, 12.18, 6.91),
    (83, 0.087, 6.762, 12.13, 6.94),
    (83, 0.083, 6.561, 12.50, 6.74),
]


def as_published() -> Benchmark:
    requests = [
        Request(
            number=number, tokens=tokens, finish="stop", client_seconds=client,
            read_seconds=read, decode_seconds=decode, tokens_per_second=rate,
        )
        for number, (tokens, read, decode, rate, client) in enumerate(PUBLISHED, 1)
    ]  # fmt: skip
    return Benchmark(url="http://x", model="m", requests=tuple(requests), streams=())


def test_the_published_run_reads_as_it_was_published() -> None:
    lines = as_published().lines()
    assert lines[0] == (
        "request 1: 83 tokens, finish stop, read 0.088 s, decode 6.651 s, 12.33 tok/s, client 6.83 s"
    )
    assert lines[-1] == "median decode tok/s 12.20, min 12.13, max 12.50"
    assert published.usd_per_million_tokens(0.60, as_published().median) == pytest.approx(
        13.66, abs=0.005
    )


def test_the_whole_protocol_runs_against_the_server(served: Served) -> None:
    heard: list[Request | Stream] = []
    found = published.run(served.url, served.key, on_request=heard.append)
    assert [*found.requests, *found.streams] == heard
    assert (len(found.requests), len(found.streams), found.model) == (5, 8, "gemma4-embedded")
    # Greedy: the same answer each time, as whole and as stream.
    assert len({(one.tokens, one.finish) for one in (*found.requests, found.streams[0])}) == 1
    for one in found.requests:
        assert one.timer == "engine"
        assert one.read_seconds is not None
        assert one.decode_seconds is not None
        # The engine's time is inside the client's.
        assert 0 < one.read_seconds + one.decode_seconds < one.client_seconds
        assert one.tokens_per_second == pytest.approx((one.tokens - 1) / one.decode_seconds)
    for stream in found.streams:
        assert 0 < stream.first_token_seconds < stream.client_seconds
        assert stream.tokens_per_second is not None
    form = r"request \d: \d+ tokens, finish \w+, read [\d.]+ s, decode [\d.]+ s, [\d.]+ tok/s, client [\d.]+ s"
    assert all(re.fullmatch(form, line) for line in found.lines()[:5])
    form = r"streamed: first token [\d.]+ to [\d.]+ s, [\d.]+ to [\d.]+ tok/s"
    assert re.fullmatch(form, found.lines()[-1])


def test_less_can_be_measured_and_an_answer_that_is_cut_says_length(served: Served) -> None:
    found = published.run(served.url, served.key, requests=1, max_tokens=3, prompts=())
    assert [(one.tokens, one.finish) for one in found.requests] == [(3, "length")]
    assert found.streams == ()
    assert found.lines()[-1].startswith("median decode tok/s")


def test_one_token_has_no_rate(served: Served) -> None:
    prompts = (published.PROMPT,)
    found = published.run(served.url, served.key, requests=1, max_tokens=1, prompts=prompts)
    assert found.median == 0
    (stream,) = found.streams
    assert (stream.tokens, stream.tokens_per_second) == (1, None)
    assert str(stream).endswith("one token")


def test_what_the_callback_raises_ends_the_run(served: Served) -> None:
    heard = []

    def enough(one: object) -> None:
        heard.append(one)
        raise InterruptedError

    with pytest.raises(InterruptedError):
        published.run(served.url, served.key, on_request=enough)
    assert len(heard) == 1


def test_a_refused_key_is_told_and_not_shown(served: Served) -> None:
    with pytest.raises(RefusedError, match="HTTP 401: Missing or incorrect API key") as refused:
        published.run(served.url, "not-the-key")
    assert "not-the-key" not in str(refused.value)


def test_nobody_at_the_port_is_told() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    with pytest.raises(UnansweredError, match=r"expected an answer from .*, found ConnectError"):
        published.run(f"http://127.0.0.1:{port}", None)


def test_a_server_that_gives_no_timings_is_measured_by_the_client_alone_and_that_is_said() -> None:
    with Scripted(Script(first=0.05, gap=0.005, tokens=11)) as endpoint:
        found = published.run(endpoint.url, None, requests=2, prompts=published.PROMPTS[:1])
    assert (found.timer, found.requests[0].read_seconds) == ("client", None)
    # 0.1 s and more, as long as the machine is busy.
    assert 0.1 <= found.requests[0].client_seconds < 1
    assert 11 < found.requests[0].tokens_per_second <= 110
    assert found.streams[0].first_token_seconds == pytest.approx(0.05, abs=0.04)
    assert found.streams[0].tokens_per_second == pytest.approx(200, rel=0.4)
    lines = found.lines()
    form = r"request 1: 11 tokens, finish length, client [\d.]+ s, [\d.]+ tok/s by the client"
    assert re.fullmatch(form, lines[0])
    assert lines[2].endswith("by the client: the server gives no timings")


def test_the_rate_by_the_engines_timer_leaves_out_the_token_that_reading_made() -> None:
    timings = {"predicted_n": 11, "predicted_ms": 500, "prompt_ms": 20, "predicted_per_second": 22}
    with Scripted(Script(timings=timings)) as endpoint:
        found = published.run(endpoint.url, None, requests=1, prompts=())
    assert found.median == 20
    assert found.timer == "engine"


WHOLE = {
    "model": "m",
    "choices": [{"finish_reason": "stop"}],
    "timings": {"predicted_n": 2, "prompt_ms": 1, "predicted_ms": 2, "predicted_per_second": 500},
}
WORD: dict[str, Any] = {"choices": [{"delta": {"content": "word"}, "finish_reason": None}]}


def answering(*stream: str | dict[str, Any], whole: object = WHOLE) -> type[Handler]:
    """A server that answers with `whole` and streams the frames of `stream`."""

    class Answering(Handler):
        def do_POST(self) -> None:  # noqa: N802
            if not json.loads(self.body()).get("stream"):
                self.answer_json(200, whole)
                return
            frames = [one if isinstance(one, str) else json.dumps(one) for one in stream]
            body = "".join(f"data: {frame}\n\n" for frame in frames)
            self.answer(200, f": ping\n\n{body}".encode(), "text/event-stream")

    return Answering


@pytest.mark.parametrize(
    ("frames", "says"),
    [
        ([WORD], "ends with \\[DONE\\], found one that was cut"),
        ([WORD, {"error": {"message": "the engine failed"}}, "[DONE]"], "found the engine failed"),
        (["[DONE]"], "expected text in answer to"),
        (["{half", "[DONE]"], "expected a chunk of a chat completion, found '{half'"),
        ([{"choices": [{}]}, "[DONE]"], "expected a chunk of a chat completion"),
        (["[]", "[DONE]"], "expected a chunk of a chat completion"),
    ],
)  # fmt: skip
def test_a_stream_that_is_not_whole_is_never_measured(frames: list[Any], says: str) -> None:
    with Door(answering(*frames)) as door, pytest.raises(BenchmarkError, match=says):
        published.run(f"http://{door.address}", None, requests=1)


@pytest.mark.parametrize("whole", [{"choices": []}, {**WHOLE, "timings": None}, [], "text"])
def test_an_answer_with_neither_timings_nor_usage_is_told(whole: object) -> None:
    with (
        Door(answering(whole=whole)) as door,
        pytest.raises(BenchmarkError, match="expected a chat completion with usage or timings"),
    ):
        published.run(f"http://{door.address}", None)
