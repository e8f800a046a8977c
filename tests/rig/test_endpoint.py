"""What an address answers, told apart hop by hop: against the real server, and against what is none."""

from __future__ import annotations

import contextlib
import socket
import threading
from typing import TYPE_CHECKING, Any

import pytest

from models import EMBEDDED
from rig import endpoint
from rig.errors import RigError
from rig.provision import Status
from rig.settings import Settings as RigSettings
from rig.states import Boot, Node, QueuedResource
from server.settings import Settings
from tests.fakes import FakeEngine, Gate
from tests.rig.fake_http import Door, Handler
from tests.server.live_server import Live

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.rig.served import Served

pytest_plugins = ["tests.rig.served"]


def live(gate: Gate | None = None) -> Live:
    """The server's own HTTP around an engine whose loading a test can hold."""
    settings = Settings(model=(str(EMBEDDED),), context=256)
    return Live(settings, FakeEngine(context=256, vocab_size=2560), gate)


@contextlib.contextmanager
def listener(says: bytes | None) -> Iterator[str]:
    """Takes one connection, and says something that is no HTTP, or nothing at all."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        ended = threading.Event()

        def serve() -> None:
            connection, _ = server.accept()
            with connection:
                if says is None:
                    ended.wait(30)
                else:
                    connection.recv(65536)
                    connection.sendall(says)

        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.getsockname()[1]}"
        finally:
            ended.set()
            thread.join(30)


class Other(Handler):
    """A server of somebody else's, that is healthy and speaks OpenAI's API."""

    def do_GET(self) -> None:  # noqa: N802
        answers: dict[str, Any] = {
            "/health": {"status": "ok"},
            "/v1/models": {"data": [{"id": "x"}]},
        }
        known = self.path in answers
        self.answer_json(200 if known else 404, answers.get(self.path, {"error": "not found"}))


def test_a_server_that_serves_is_told_with_model_device_and_counters(served: Served) -> None:
    found = endpoint.check(served.url, served.key)
    assert (found.state, found.is_serving, found.health, found.do) == ("serving", True, 200, None)
    assert (found.model, found.device, found.dtype) == ("gemma4-embedded", "cpu", "bfloat16")
    assert found.context == 8192
    assert found.versions["torch"].startswith("2.")
    assert found.load_seconds is not None
    assert found.counters is not None
    assert found.counters.running == found.counters.waiting == 0
    assert served.key not in found.model_dump_json()


@pytest.mark.parametrize(
    ("key", "says"),
    [(None, "It refuses callers without a key."), ("wrong", "It refuses the key it got.")],
)
def test_a_wrong_key_is_told_from_none_and_neither_is_shown(
    served: Served, key: str | None, says: str
) -> None:
    found = endpoint.check(served.url, key)
    assert (found.state, found.text, found.health) == ("unauthorized", says, 200)
    assert "torchtpu-rig address" in (found.do or "")
    assert "wrong" not in found.model_dump_json()


def test_a_server_that_loads_is_told_with_its_phase_and_then_serves() -> None:
    gate = Gate()
    with contextlib.closing(live(gate)) as server:
        gate.wait_until_reached()
        found = endpoint.check(server.url, None)
        assert (found.state, found.health, found.phase, found.progress) == (
            "loading", 503, "weights", 0.5,
        )  # fmt: skip
        assert found.text == "It loads the model: weights, 50%."
        gate.open()
        server.wait_until_ready()
        assert endpoint.check(server.url, None).is_serving
        server.service.draining = True
        drains = endpoint.check(server.url, None)
        assert (drains.state, drains.health) == ("draining", 503)
        server.service.draining = False


def test_a_server_whose_engine_ended_is_told() -> None:
    with contextlib.closing(live().wait_until_ready()) as server:
        server.service.worker.stop()
        server.service.worker.join(30)
        found = endpoint.check(server.url, None)
        assert (found.state, found.health, found.text) == ("failed", 503, "Its engine has ended.")


def test_nobody_at_the_port_is_told_with_what_may_be_in_the_way() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    found = endpoint.check(f"http://127.0.0.1:{port}", "key")
    assert (found.state, found.health) == ("unreachable", None)
    assert "refused" in found.text
    assert "SOURCE_RANGE" in (found.do or "")


def test_a_port_that_takes_connections_and_is_silent_is_told(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(endpoint, "ANSWER_SECONDS", 0.2)
    with listener(None) as url:
        found = endpoint.check(url, None)
    assert (found.state, found.text) == (
        "silent", "It takes connections and does not answer /health: ReadTimeout.",
    )  # fmt: skip


@pytest.mark.parametrize("says", [b"SSH-2.0-OpenSSH_9.6\r\n", b""])
def test_what_does_not_speak_http_is_told(says: bytes) -> None:
    with listener(says) as url:
        found = endpoint.check(url, None)
    assert found.state == "foreign"
    assert found.text.startswith("It does not answer in HTTP: ")


def test_another_openai_server_is_not_taken_for_ours() -> None:
    with Door(Other) as door:
        found = endpoint.check(f"http://{door.address}", None)
    assert found.state == "foreign"
    assert "not torchtpu-rs: /v1/engine is answered" in found.text


class Page(Handler):
    """A proxy's page, for everything."""

    def do_GET(self) -> None:  # noqa: N802
        self.answer(200, b"<html>Sign in</html>", "text/html")


def test_a_page_is_not_taken_for_health() -> None:
    with Door(Page) as door:
        found = endpoint.check(f"http://{door.address}", None)
    assert (found.state, found.health) == ("foreign", None)


def test_counters_are_sums_over_labels_and_nothing_where_there_is_none() -> None:
    text = (
        "# HELP torchtpu_requests_total x\n"
        'torchtpu_requests_total{endpoint="a",finish_reason="stop",status="200"} 3.0\n'
        'torchtpu_requests_total{endpoint="a",finish_reason="cancelled",status="499"} 2.0\n'
        "torchtpu_requests_running 1.0\n"
        "torchtpu_generation_tokens_total 1e+03\n"
    )
    found = endpoint.counters(text)
    assert (found.requests, found.cancelled, found.running, found.generation_tokens) == (
        5,
        2,
        1,
        1000,
    )
    assert (found.waiting, found.prompt_tokens) == (0, 0)


class Session:
    """As much of one as an address needs."""

    def __init__(self, status: Status, **settings: Any) -> None:
        self.settings = RigSettings(project_id="my-project", **settings)
        self.rig = self
        self._status = status

    def status(self) -> Status:
        return self._status


RESOURCE = QueuedResource.model_validate(
    {"name": "projects/p/locations/us-west4-a/queuedResources/q", "state": {"state": "ACTIVE"}}
)
ENDPOINT = [{"ipAddress": "10.0.0.2", "accessConfig": {"externalIp": "203.0.113.9"}}]


def test_the_address_is_the_vms_own_with_the_port_of_the_settings() -> None:
    node = Node(name="n", state="READY", network_endpoints=ENDPOINT)
    session: Any = Session(Status(RESOURCE, node, Boot()), serve_port=9000)
    assert endpoint.address(session) == "http://203.0.113.9:9000"


@pytest.mark.parametrize(
    ("status", "settings", "says"),
    [
        (Status(None, None, Boot()), {}, "found it absent; `torchtpu-rig watch`"),
        (Status(RESOURCE, None, Boot()), {}, "found it booting"),
        (
            Status(RESOURCE, Node(name="n", state="CREATING"), Boot()),
            {},
            r"without one \(CREATING\)",
        ),
        (
            Status(RESOURCE, Node(name="n", network_endpoints=ENDPOINT), Boot()),
            {"access": "iap"},
            "run `torchtpu-rig tunnel` and use http://127.0.0.1:18000",
        ),
    ],
)
def test_without_an_address_that_is_open_it_is_told_what_to_do(
    status: Status, settings: dict[str, str], says: str
) -> None:
    session: Any = Session(status, **settings)
    with pytest.raises(RigError, match=says):
        endpoint.address(session)
