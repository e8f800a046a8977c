"""A real server on a real socket around a `FakeEngine`, and what tests say to it; `http_fixtures` makes them."""

from __future__ import annotations

import contextlib
import json
import socket
import threading
from typing import TYPE_CHECKING, Any

import httpx

from server.app import create_app
from server.loading import ModelLoader
from server.service import Service
from server.serving import DrainingServer, bind, http_config, url_of
from tests.fakes import PATIENCE_SECONDS, FakeEngine, Gate

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from server.settings import Settings
    from server.tokenizer import Tokenizer
    from server.worker import Progress
    from tests.fakes import Item

SAY_HI = [{"role": "user", "content": "Say hi."}]


class FakeLoader(ModelLoader):
    """Loads the text side from disk as ever, and puts a `FakeEngine` where the weights would be."""

    def __init__(self, settings: Settings, engine: FakeEngine, gate: Gate | None = None) -> None:
        super().__init__(settings)
        self.engine = engine
        self._gate = gate

    def build_engine(
        self,
        folders: Sequence[Path],
        on_load: Callable[[int, int], object],
        on_compile: Callable[[int, int, str], object],
    ) -> FakeEngine:
        """Four tensors, a gate after the first two, and the engine is this thread's."""
        for done in range(5):
            on_load(done, 4)
            if done == 2 and self._gate is not None:
                self._gate.pass_through()
        self.build = {"torch": "2.14.1", "rustc": "1.95", "python": "3.11", "crate": "0.1.0"}
        return self.engine.built_here()


class Live:
    """A server that runs; `script` sets what the engine says next."""

    def __init__(
        self,
        settings: Settings,
        engine: FakeEngine | None = None,
        gate: Gate | None = None,
        *,
        loader: ModelLoader | None = None,
    ) -> None:
        """Start it; `loader` brings an engine of its own, and `engine` is then unused."""
        self.engine = engine or FakeEngine()
        self.settings = settings
        self.ready = threading.Event()
        self.ended = threading.Event()
        self.loader = loader or FakeLoader(settings, self.engine, gate)
        self.service = Service(settings, self.loader, self._progressed)
        self.server = DrainingServer(http_config(create_app(self.service)), self.service)
        self._listener = bind(settings.host, 0)
        self.url = url_of(self._listener)
        self.port: int = self._listener.getsockname()[1]
        # No TLS here, and loading its certificates would take longer than most tests.
        self.http = httpx.Client(base_url=self.url, timeout=PATIENCE_SECONDS, verify=False)
        self._thread = threading.Thread(target=self._run, name="test-server")
        self._thread.start()

    def wait_until_ready(self) -> Live:
        """Block until requests are served."""
        assert self.ready.wait(PATIENCE_SECONDS), self.service.worker.failure
        return self

    @property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer the server uses."""
        assert self.loader.text is not None
        return self.loader.text.tokenizer

    def ids(self, text: str) -> list[int]:
        """The ids a model would say `text` with."""
        return self.tokenizer.encode_text(text)

    def script(self, *items: Item | str) -> None:
        """Set what the engine says: text, single ids, gates, crashes."""
        script: list[Item] = []
        for item in items:
            script += self.ids(item) if isinstance(item, str) else [item]
        self.engine.script = script

    def chat(self, content: Any = "Say hi.", **fields: Any) -> httpx.Response:
        """POST a chat request."""
        body = {"messages": [{"role": "user", "content": content}], **fields}
        return self.http.post("/v1/chat/completions", json=body)

    def complete(self, prompt: Any = "Once", **fields: Any) -> httpx.Response:
        """POST a completion request."""
        return self.http.post("/v1/completions", json={"prompt": prompt, **fields})

    def metric(self, name: str, **labels: str) -> float:
        """The value of one sample, 0 if there is none; summed over the labels not given."""
        total = 0.0
        for family in self.service.metrics.registry.collect():
            for sample in family.samples:
                if sample.name == name and labels.items() <= sample.labels.items():
                    total += sample.value
        return total

    def send_raw(self, method: str, path: str, body: bytes = b"", *headers: str) -> bytes:
        """One request on a connection of its own; everything that comes back until it closes."""
        with contextlib.closing(self.connect(method, path, body, *headers)) as connection:
            return read_all(connection)

    def connect(self, method: str, path: str, body: bytes = b"", *headers: str) -> socket.socket:
        """Send a request and leave the connection open."""
        connection = socket.create_connection(("127.0.0.1", self.port), PATIENCE_SECONDS)
        lines = [
            f"{method} {path} HTTP/1.1",
            "host: test",
            "connection: close",
            *headers,
        ]
        if body:
            lines += ["content-type: application/json", f"content-length: {len(body)}"]
        connection.sendall("\r\n".join([*lines, "", ""]).encode() + body)
        return connection

    def open_chat(self, **fields: Any) -> socket.socket:
        """A chat request on a connection the test will drop."""
        body = json.dumps({"messages": SAY_HI, **fields}).encode()
        return self.connect("POST", "/v1/chat/completions", body)

    def close(self) -> None:
        """Stop the server and wait until it is gone."""
        self.http.close()
        self.server.should_exit = True
        self._thread.join(PATIENCE_SECONDS)
        assert not self._thread.is_alive(), "the server did not stop"

    def _run(self) -> None:
        with self._listener:
            self.server.run(sockets=[self._listener])
        self.ended.set()

    def _progressed(self, progress: Progress) -> None:
        if progress.phase == "ready":
            # What was decoded to warm up is not the tests' business.
            self.engine.calls.clear()
            self.engine.finishes.clear()
            self.ready.set()
        elif progress.phase == "failed":
            self.server.load_failed()


def read_all(connection: socket.socket) -> bytes:
    """Everything until the other side closes."""
    data = b""
    while piece := connection.recv(65536):
        data += piece
    return data


def payloads(body: bytes | str) -> list[Any]:
    """The JSON of every frame of a stream but the last, which has to be `[DONE]`; comments are left out."""
    text = body.decode() if isinstance(body, bytes) else body
    frames = [frame for frame in text.split("\n\n") if frame and not frame.startswith(":")]
    assert all(frame.startswith("data: ") for frame in frames), frames
    assert frames[-1] == "data: [DONE]"
    return [json.loads(frame.removeprefix("data: ")) for frame in frames[:-1]]


def content_of(chunks: Sequence[Any]) -> str:
    """The visible text of a chat stream."""
    return "".join(
        choice["delta"].get("content") or "" for chunk in chunks for choice in chunk["choices"]
    )


def assert_openai_error(
    response: httpx.Response, status: int, *, param: str | None = None, code: str | None = None
) -> str:
    """The whole form of a refusal; returns its message."""
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/json"
    assert len(response.content) < 8192
    error = response.json()["error"]
    assert {"message", "type", "param", "code"} <= error.keys()
    assert isinstance(error["message"], str)
    assert error["message"]
    assert isinstance(error["type"], str)
    assert (error["param"], error["code"]) == (param, code), error
    return str(error["message"])


def eventually(condition: Callable[[], bool], what: str) -> None:
    """Wait for something another thread is about to do and that has no event to wait on."""
    waiter = threading.Event()
    for _ in range(int(PATIENCE_SECONDS / 0.005)):
        if condition():
            return
        waiter.wait(0.005)
    raise AssertionError(f"never happened: {what}")
