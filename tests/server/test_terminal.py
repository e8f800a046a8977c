"""The terminal chat against a small real server: turns, commands, Ctrl-C, faults and what is printed."""

from __future__ import annotations

import io
import json
import signal
import threading
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING, Any

import pytest
from rich.console import Console

from server.terminal import run

if TYPE_CHECKING:
    from collections.abc import Iterator

TIMINGS = {"queue_ms": 5.0, "prompt_ms": 120.0, "predicted_n": 3, "predicted_per_second": 41.26}


def content(text: str) -> dict[str, Any]:
    return {"choices": [{"delta": {"content": text}}]}


def answer(*chunks: dict[str, Any]) -> list[str]:
    """Return the frames of a whole answer, with a role first, timings last and a ping between."""
    role = {"choices": [{"delta": {"role": "assistant", "content": ""}}]}
    last = {"choices": [{"delta": {}, "finish_reason": "stop"}], "timings": TIMINGS}
    frames = [f"data: {json.dumps(chunk)}\n\n" for chunk in (role, *chunks, last)]
    return [": ping\n\n", *frames, "data: [DONE]\n\n"]


@dataclass
class FakeServer:
    """A server that plays one script of frames a request and keeps what it was sent."""

    url: str = ""
    scripts: list[list[str]] = field(default_factory=list)
    requests: list[dict[str, Any]] = field(default_factory=list)
    keys: list[str | None] = field(default_factory=list)
    interrupts: bool = False  # once: keep the stream open after the script and press Ctrl-C
    status: int = 200
    left: threading.Event = field(default_factory=threading.Event)
    printed: threading.Event = field(default_factory=threading.Event)


class _Handler(BaseHTTPRequestHandler):
    fake: FakeServer

    def do_GET(self) -> None:
        self._json(200, {"data": [{"id": "tiny"}]})

    def do_POST(self) -> None:
        fake = self.fake
        length = int(self.headers["content-length"])
        fake.requests.append(json.loads(self.rfile.read(length)))
        fake.keys.append(self.headers["authorization"])
        if fake.status != 200:
            self._json(fake.status, {"error": {"message": "the prompt is too long"}})
            return
        self.send_response(200)
        self.send_header("content-type", "text/event-stream")
        self.end_headers()
        for frame in fake.scripts.pop(0):
            self.wfile.write(frame.encode())
            self.wfile.flush()
        if fake.interrupts:
            fake.interrupts = False
            main = threading.main_thread().ident
            assert main is not None
            assert fake.printed.wait(10)
            signal.pthread_kill(main, signal.SIGINT)
            self.connection.settimeout(10)
            if self.connection.recv(1) == b"":  # the client closed the connection
                fake.left.set()

    def _json(self, status: int, body: object) -> None:
        self.send_response(status)
        self.end_headers()
        self.wfile.write(json.dumps(body).encode())

    def log_message(self, *_: object) -> None:
        """Say nothing."""


@pytest.fixture
def fake() -> Iterator[FakeServer]:
    with serving() as fake:
        yield fake


@contextmanager
def serving() -> Iterator[FakeServer]:
    fake = FakeServer()
    handler = type("Handler", (_Handler,), {"fake": fake})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        fake.url = f"http://127.0.0.1:{server.server_port}"
        thread = threading.Thread(
            target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True
        )
        thread.start()
        try:
            yield fake
        finally:
            server.shutdown()
            thread.join(10)


def talk(fake: FakeServer, *lines: str, **options: Any) -> tuple[int, str]:
    """Type `lines`, then Ctrl-D, and return the exit code and what was printed."""
    typed = iter(lines)

    def read_line(_: str) -> str:
        try:
            line = next(typed)
        except StopIteration:
            raise EOFError from None
        if line == "^C":
            raise KeyboardInterrupt
        return line

    class Screen(io.StringIO):
        def write(self, text: str) -> int:
            if "half an" in text:
                fake.printed.set()
            return super().write(text)

    printed = Screen()
    console = Console(file=printed, width=200)
    code = run(
        fake.url,
        options.pop("model", None),
        options.pop("system", None),
        console,
        read_line,
        **options,
    )
    return code, printed.getvalue()


def test_an_answer_is_printed_with_its_speed(fake: FakeServer) -> None:
    fake.scripts = [answer(content("Hello "), content("[bold]you[/bold] 🙂"))]
    code, printed = talk(fake, "hi")
    assert code == 0
    assert "Hello [bold]you[/bold] 🙂\n" in printed
    assert "3 tokens, 41.3 tokens/s, first token after 125 ms" in printed
    assert fake.requests == [
        {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "stream": True}
    ]


def test_the_talk_goes_on_with_what_was_said(fake: FakeServer) -> None:
    fake.scripts = [answer(content("one")), answer(content("two"))]
    talk(fake, "first", "", "second", model="other", system="Be brief.", api_key="secret")
    assert fake.requests[1] == {
        "model": "other",
        "messages": [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": "first"},
            {"role": "assistant", "content": "one"},
            {"role": "user", "content": "second"},
        ],
        "stream": True,
    }
    assert fake.keys == ["Bearer secret"] * 2


def test_commands_change_the_talk_and_are_not_sent(fake: FakeServer) -> None:
    fake.scripts = [answer(content("one")), answer(content("two")), answer(content("three"))]
    code, printed = talk(
        fake,
        "/system Be kind.",
        "a",
        "/reset",
        "b",
        "/system",
        "/reset",
        "c",
        "/help",
        "/quit",
        "d",
    )
    assert code == 0
    assert "/reset        forget the talk" in printed
    system = {"role": "system", "content": "Be kind."}
    assert [request["messages"] for request in fake.requests] == [
        [system, {"role": "user", "content": "a"}],
        [system, {"role": "user", "content": "b"}],
        [{"role": "user", "content": "c"}],
    ]


def test_reasoning_is_shown_and_not_sent_back(fake: FakeServer) -> None:
    reasoning = {"choices": [{"delta": {"reasoning_content": "Hm. "}}]}
    fake.scripts = [answer(reasoning, content("Yes.")), answer(content("ok"))]
    _, printed = talk(fake, "so?", "why?")
    assert "Hm. Yes." in printed
    assert fake.requests[1]["messages"][1] == {"role": "assistant", "content": "Yes."}


def test_what_a_model_writes_cannot_steer_the_terminal(fake: FakeServer) -> None:
    fake.scripts = [answer(content("a\x1b[2J\x9b1m\x07\rb\tc\nd"))]
    _, printed = talk(fake, "hi")
    assert "a[2J1mb" in printed
    assert not {"\x1b", "\x9b", "\x07", "\r"} & set(printed)


@pytest.fixture
def _interruptible() -> Iterator[None]:
    """Python's own handler: a shell starts background jobs with SIGINT ignored, and Python leaves it so."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("_interruptible")
def test_ctrl_c_stops_the_answer_and_not_the_program(fake: FakeServer) -> None:
    fake.interrupts = True
    fake.scripts = [[f"data: {json.dumps(content('half an'))}\n\n"], answer(content("whole"))]
    code, printed = talk(fake, "^C", "first", "second")
    assert code == 0
    assert fake.left.wait(10), "the server never saw the connection close"
    assert "/quit or Ctrl-D leaves" in printed
    assert "half an\nstopped\n" in printed
    assert "whole" in printed
    assert fake.requests[1]["messages"][1] == {"role": "assistant", "content": "half an"}


def test_a_refusal_is_printed_and_the_turn_taken_back(fake: FakeServer) -> None:
    fake.status = 400
    code, printed = talk(fake, "long", "longer")
    assert code == 0
    assert "400: the prompt is too long" in printed
    assert fake.requests[1]["messages"] == [{"role": "user", "content": "longer"}]


@pytest.mark.parametrize(
    ("frames", "expected"),
    [
        (['data: {"error": {"message": "out of memory"}}\n\n'], "the server failed: out of memory"),
        ([f"data: {json.dumps(content('half'))}\n\n"], "the server cut the answer short"),
        (["data: not json\n\n"], "expected OpenAI's chunks, found something else"),
    ],
)
def test_a_stream_that_fails_is_told_apart_from_an_answer(
    fake: FakeServer, frames: list[str], expected: str
) -> None:
    fake.scripts = [frames, answer(content("fine"))]
    code, printed = talk(fake, "first", "second")
    assert code == 0
    assert expected in printed
    assert fake.requests[1]["messages"] == [{"role": "user", "content": "second"}]


def test_a_server_that_is_not_there_is_said_with_what_to_do() -> None:
    with serving() as fake:
        pass
    code, printed = talk(fake, "hi")
    assert code == 1
    assert "no server answers" in printed
    assert "torchtpu-rs serve" in printed
