"""The demo's MCP server as a client has it: the SDK's own client over stdio, the real shim, and the real server behind it."""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys
import threading
from concurrent.futures import CancelledError
from typing import TYPE_CHECKING, Any

import anyio.from_thread
import httpx
import pytest
from mcp import Client
from mcp.client.stdio import StdioServerParameters, stdio_client

from demo.mcp_server import TOOLS, shim_url
from rig.endpoint import counters
from rig.settings import ROOT
from rig.states import STAGES
from tests.demo.shims import Shim, eventually
from tests.fakes import PATIENCE_SECONDS
from tests.rig.talk import ERAS, NODE, PROJECT, Talk
from tests.server.live_server import SAY_HI

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from rig.endpoint import Counters
    from tests.rig.served import Served
    from tests.rig.talk import Era, World

pytest_plugins = ["tests.rig.served", "tests.rig.talk_fixtures"]

both_eras = pytest.mark.parametrize("era", ERAS)
QUESTION = "What is a TPU?"


@pytest.fixture(scope="module")
def shim(served: Served, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shim]:
    key = tmp_path_factory.mktemp("demo") / "key"
    key.write_text(served.key)
    with Shim("--url", served.url, "--api-key-file", str(key)) as made:
        yield made


@contextlib.contextmanager
def talking(place: Path, url: str, era: Era = "auto") -> Iterator[Talk]:
    """A client and its server process, which asks the shim at `url`."""
    pid, log = place / "pid", place / "log"
    with contextlib.ExitStack() as open_:
        parameters = StdioServerParameters(
            command="sh",
            args=["-c", f"echo $$ >{pid}; exec {sys.executable} -m demo.mcp_server"],
            cwd=ROOT,
            env={"TORCHTPU_SHIM_URL": url},
        )
        errors = open_.enter_context(log.open("w"))
        client = Client(stdio_client(parameters, errlog=errors), mode=era)
        portal = open_.enter_context(anyio.from_thread.start_blocking_portal())
        open_.enter_context(portal.wrap_async_context_manager(client))
        yield Talk(client, portal, pid, log)


@pytest.fixture(scope="module")
def talks(shim: Shim, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[Era, Talk]]:
    with contextlib.ExitStack() as open_:
        yield {
            era: open_.enter_context(
                talking(tmp_path_factory.mktemp("talk"), f"{shim.url}/v1", era)
            )
            for era in ERAS
        }


@pytest.fixture
def talk(talks: dict[Era, Talk]) -> Talk:
    talks["auto"].on_progress = lambda _: None
    return talks["auto"]


def counted(served: Served) -> Counters:
    headers = {"authorization": f"Bearer {served.key}"}
    return counters(httpx.get(f"{served.url}/metrics", headers=headers).text)


@both_eras
def test_the_five_tools_are_typed_and_change_nothing(talks: dict[Era, Talk], era: Era) -> None:
    tools = talks[era].tools()
    assert list(tools) == [tool.__name__ for tool, _ in TOOLS]
    for tool in tools.values():
        assert tool.annotations is not None
        assert tool.annotations.read_only_hint
        assert tool.output_schema is not None
        assert tool.description
    ask = tools["ask_gemma_rust"].input_schema
    assert ask["required"] == ["prompt"]
    assert set(ask["properties"]) == {"prompt", "system", "max_tokens"}


@both_eras
def test_an_answer_has_the_published_form_and_its_numbers(talks: dict[Era, Talk], era: Era) -> None:
    told = talks[era].call("ask_gemma_rust", prompt=QUESTION)
    assert not told.error, told.text
    text, line = told.text.split("\n---\n")
    assert text == told.found["text"]
    assert text.startswith("A TPU is")
    assert re.fullmatch(
        r"gemma4-embedded · finish `stop` · 14 prompt \+ \d+ completion tokens · prompt read \d+\.\d{3} s"
        r" · decode \d+\.\d tok/s on the CPU · \d+\.\d\d s round trip from here",
        line,
    ), line
    assert told.found["device"] == "cpu"
    assert told.found["prompt_tokens"] == 14
    assert 0 < told.found["prompt_seconds"] < told.found["round_trip_seconds"]


@both_eras
def test_a_streamed_answer_is_told_as_it_grows_and_is_the_same(
    talks: dict[Era, Talk], era: Era
) -> None:
    talk = talks[era]
    whole = talk.call("ask_gemma_rust", prompt=QUESTION).found["text"]
    told = talk.call("stream_gemma_rust", prompt=QUESTION)
    assert told.found["text"] == whole
    assert told.progress
    for before, after in zip(told.progress, told.progress[1:], strict=False):
        assert after.startswith(before)
        assert len(after) > len(before)
    assert told.progress[-1] == whole
    assert len(told.progress[0]) < len(whole)
    assert 0 < told.found["first_text_seconds"] < told.found["round_trip_seconds"]
    assert told.found["pieces"] > 5
    assert " · first text " in told.text


def test_system_prompt_and_limit_are_passed_on(talk: Talk) -> None:
    told = talk.call("ask_gemma_rust", prompt=QUESTION, system="Answer shortly.", max_tokens=3)
    assert told.found["finish"] == "length"
    assert told.found["completion_tokens"] == 3
    assert told.found["prompt_tokens"] > 14
    assert talk.call("ask_gemma_rust", prompt="").error
    assert talk.call("ask_gemma_rust", prompt=QUESTION, max_tokens=0).error


def test_a_prompt_that_is_too_long_is_told_in_the_servers_words(talk: Talk) -> None:
    told = talk.call("ask_gemma_rust", prompt="ocean " * 9000)
    assert told.error
    assert "HTTP 400: " in told.text
    assert "maximum context length is 8192 tokens" in told.text


def test_a_call_that_is_cancelled_stops_the_server(
    talk: Talk, served: Served, occupied: Callable[[], contextlib.AbstractContextManager[None]]
) -> None:
    before = counted(served).cancelled
    with occupied():
        # It waits for the one that runs: nothing but leaving can end it.
        calls = [
            talk.begin(tool, prompt=QUESTION) for tool in ("ask_gemma_rust", "stream_gemma_rust")
        ]
        eventually(lambda: counted(served).waiting == 2, "both wait")
        for call in calls:
            call.cancel()
            with pytest.raises(CancelledError):
                call.result(PATIENCE_SECONDS)
        eventually(lambda: counted(served).waiting == 0, "nobody waits")
    eventually(lambda: counted(served).running == 0, "the engine is idle")
    # These two and the one that was in the way.
    eventually(lambda: counted(served).cancelled == before + 3, "all are counted")
    assert not talk.call("ask_gemma_rust", prompt=QUESTION).error


@pytest.fixture
def occupied(served: Served) -> Callable[[], contextlib.AbstractContextManager[None]]:
    """Keeps the server busy with somebody else's answer."""

    @contextlib.contextmanager
    def busy() -> Iterator[None]:
        body: dict[str, Any] = {"messages": SAY_HI, "stream": True, "ignore_eos": True}
        headers = {"authorization": f"Bearer {served.key}"}
        url = f"{served.url}/v1/chat/completions"
        with httpx.stream(
            "POST", url, json=body | {"max_tokens": 8000}, headers=headers, timeout=60
        ):
            eventually(lambda: counted(served).running == 1, "the server is busy")
            yield

    return busy


def test_what_is_loaded_is_told(talk: Talk) -> None:
    told = talk.call("engine_info")
    assert told.text.startswith("gemma4-embedded on cpu: ok\n- weights ")
    assert told.found["versions"]["torch"] in told.text
    assert told.found["layout"]["context"] == 8192
    assert "#[pyclass(unsendable)]" in told.found["engine_class"]


def test_counters_are_told(talk: Talk, served: Served) -> None:
    talk.call("ask_gemma_rust", prompt=QUESTION)
    told = talk.call("serving_metrics")
    now = counted(served)
    assert told.found | now.model_dump() == told.found
    assert f"{now.requests} requests answered, {now.cancelled} of them cancelled" in told.text
    assert told.found["first_token_seconds"] > 0


def test_where_requests_go_is_told_in_the_published_form(
    talk: Talk, shim: Shim, served: Served, world: World, tmp_path: Path
) -> None:
    told = talk.call("endpoint_status")
    assert told.text == f"🟢 local {shim.url}/v1 → {served.url}\n- server /health: 200"
    world.settings(SERVE_PORT=served.port)
    world.there("ACTIVE")
    world.tpu.publish(NODE, stage="STAGE: serving", progress="\n".join([*STAGES, "DONE"]))
    with Shim(environment=world.environment) as other, talking(tmp_path, other.url) as through:
        told = through.call("endpoint_status")
        assert told.text == (
            f"🟢 local {other.url}/v1 → {served.url}\n"
            "- TPU /health: 200\n"
            f"- queued resource `gemma4-rust-qr` in us-west4-a, project {PROJECT}"
        )
        assert told.found["phase"] == "serving"


def test_what_fails_is_told_by_its_hop(tmp_path: Path) -> None:
    with Shim("--url", "http://127.0.0.1:9") as shim, talking(tmp_path, shim.url) as talk:
        told = talk.call("endpoint_status")
        assert not told.error
        lines = told.text.splitlines()
        assert lines[:2] == [
            f"🔴 local {shim.url}/v1 → http://127.0.0.1:9",
            "- server /health: no answer",
        ]
        assert "laptop → server: http://127.0.0.1:9 took no connection" in lines[2]
        for tool, arguments in (
            ("ask_gemma_rust", {"prompt": "x"}),
            ("stream_gemma_rust", {"prompt": "x"}),
            ("engine_info", {}),
        ):
            told = talk.call(tool, **arguments)
            assert told.error
            assert "laptop → server: http://127.0.0.1:9" in told.text
        shim.end()
        for tool in ("ask_gemma_rust", "endpoint_status", "serving_metrics"):
            told = talk.call(tool, **({"prompt": "x"} if tool == "ask_gemma_rust" else {}))
            assert told.error
            assert f"expected the shim at {shim.url}, found nobody there" in told.text
            assert "systemctl --user start torchtpu-shim" in told.text


def test_an_answer_that_is_cut_is_an_error_with_the_text_until_then(tmp_path: Path) -> None:
    from tests.rig.hops import STREAM, Hop, chunk

    released = threading.Event()
    piece = b'data: {"model": "m", "choices": [{"index": 0, "delta": {"content": "half an"}, "finish_reason": null}]}\n\n'

    def play(connection: Any) -> None:
        connection.sendall(STREAM + chunk(piece))
        assert released.wait(PATIENCE_SECONDS)

    # Another server than ours: its /v1/engine is a stream that is cut, too.
    with Hop(play) as hop, Shim("--url", hop.url) as shim, talking(tmp_path, shim.url) as talk:
        released.set()
        told = talk.call("stream_gemma_rust", prompt="x")
        assert told.error
        assert "the answer was cut" in told.text
        assert told.text.endswith("The text until then: half an")


@pytest.mark.parametrize(
    ("given", "url"),
    [("http://127.0.0.1:8015/v1/", "http://127.0.0.1:8015"), (" http://localhost:1 ", "http://localhost:1")],
)  # fmt: skip
def test_the_shims_address_is_taken_with_and_without_v1(given: str, url: str) -> None:
    assert shim_url(given) == url


def test_an_address_that_is_none_ends_the_server_with_a_sentence() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "demo.mcp_server"],
        cwd=ROOT, env={"PATH": os.environ["PATH"], "TORCHTPU_SHIM_URL": "8015"},
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == (
        "torchtpu-rs-demo: TORCHTPU_SHIM_URL: expected an address like http://127.0.0.1:8015, found '8015'\n"
    )
