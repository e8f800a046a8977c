"""What is left when a call or the server ends in the middle: one VM, its key, and a way to find it; and what never leaves the process."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from typing import TYPE_CHECKING, Any

import pytest
from mcp import MCPError

from rig.mcp_server import settings_file
from rig.settings import ROOT
from tests.rig.fake_tpu import RefusedError
from tests.rig.talk import ERAS, NAME, NODE, PATIENCE_SECONDS, TOKEN, Held, types_name, yes

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from mcp_types import ElicitResult

    from tests.rig.talk import Era, World

CREATE, DELETE = "create_tpu_queued_resource", "delete_tpu_queued_resource"

pytest_plugins = ["tests.rig.talk_fixtures"]

both_eras = pytest.mark.parametrize("era", ERAS)


@pytest.fixture
def held(world: World, monkeypatch: pytest.MonkeyPatch) -> Held:
    """Creating, at the service."""
    step = Held(world.tpu.create)
    monkeypatch.setattr(world.tpu, "create", step)
    return step


def eventually(condition: Callable[[], bool], what: str) -> None:
    """Wait for what another process is about to do."""
    waiter = threading.Event()
    for _ in range(int(PATIENCE_SECONDS / 0.02)):
        if condition():
            return
        waiter.wait(0.02)
    raise AssertionError(f"never happened: {what}")


@both_eras
def test_killed_after_the_service_took_the_request_the_next_server_finds_the_vm_and_its_key(
    world: World, held: Held, era: Era
) -> None:
    first = world.another(era)
    call = first.begin(CREATE)
    held.wait()
    first.kill()
    held.release()
    with pytest.raises(MCPError, match=r"[Cc]onnection closed"):
        call.result(PATIENCE_SECONDS)
    eventually(lambda: world.made() == [NAME], "the service made it")
    again = world.talk(era).call(CREATE)
    assert again.found["already_there"] is True
    assert world.made() == [NAME]
    assert len(world.asked_for()) == 1
    metadata = world.tpu.resources[NAME]["tpu"]["nodeSpec"][0]["node"]["metadata"]
    assert metadata["api-key"] == world.key()


def test_killed_before_the_service_took_it_the_next_server_asks_for_the_same_one(
    world: World, held: Held, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = held.step
    first = world.another()
    call = first.begin(CREATE)
    held.wait()
    key = world.key()
    first.kill()
    held.outcome = RefusedError(503, "UNAVAILABLE", "The service is currently unavailable.")
    held.release()
    with pytest.raises(MCPError, match=r"[Cc]onnection closed"):
        call.result(PATIENCE_SECONDS)
    assert world.made() == []
    monkeypatch.setattr(world.tpu, "create", real)
    talk = world.talk()
    again = talk.call(CREATE)
    assert (again.error, again.found["already_there"], len(talk.asked)) == (False, False, 1)
    assert world.made() == [NAME]
    ids = world.asked_for()
    assert (len(ids), len(set(ids))) == (2, 1)
    assert world.key() == key


def test_killed_while_the_user_is_asked_nothing_is_created(world: World) -> None:
    first = world.another("legacy")

    def kills(_: str) -> ElicitResult:
        first.kill()
        return yes()

    first.says = kills
    with pytest.raises(MCPError, match=r"[Cc]onnection closed"):
        first.call(CREATE)
    assert (world.made(), world.asked_for()) == ([], [])


def test_two_servers_that_are_both_told_yes_create_one_vm(world: World) -> None:
    together = threading.Barrier(2)

    def waits(_: str) -> ElicitResult:
        # Both users see that there is none, before either agrees.
        together.wait(PATIENCE_SECONDS)
        return yes()

    talks = [world.another(era) for era in ERAS]
    for talk in talks:
        talk.says = waits
    calls = [talk.begin(CREATE) for talk in talks]
    told = [call.result(PATIENCE_SECONDS) for call in calls]
    assert [one.error for one in told] == [False, False]
    assert world.made() == [NAME]
    assert len(set(world.asked_for())) == 1
    metadata = world.tpu.resources[NAME]["tpu"]["nodeSpec"][0]["node"]["metadata"]
    assert metadata["api-key"] == world.key()


def test_an_answer_that_was_lost_is_asked_for_again_and_makes_nothing_twice(world: World) -> None:
    world.tpu.lost_answers = 1
    assert not world.talk().call(CREATE).error
    ids = world.asked_for()
    assert (world.made(), len(ids), len(set(ids))) == ([NAME], 2, 1)


@both_eras
def test_cancelling_leaves_the_queued_resource_alone_and_says_its_name(
    world: World, held: Held, era: Era
) -> None:
    talk = world.another(era)
    heard: list[str] = []
    talk.on_progress = heard.append
    call = talk.begin(CREATE)
    held.wait()
    call.cancel()
    eventually(lambda: "cancelled while gemma4-rust-qr" in talk.log, "the server says so")
    assert "delete_tpu_queued_resource ends it" in talk.log
    assert any("gemma4-rust-qr in us-west4-a" in line for line in heard)
    held.release()
    eventually(lambda: world.made() == [NAME], "the service made it")
    assert talk.call("get_queued_resource").found["state"] == "CREATING"
    assert talk.call(CREATE).found["already_there"] is True
    assert len(world.asked_for()) == 1


@both_eras
def test_cancelling_a_wait_ends_it_and_the_next_call_is_answered(world: World, era: Era) -> None:
    world.there("PROVISIONING")
    talk = world.talk(era)
    waits = threading.Event()
    talk.on_progress = lambda _: waits.set()
    call = talk.begin("get_rig_progress", wait_seconds=3600)
    assert waits.wait(PATIENCE_SECONDS)
    call.cancel()
    assert talk.call("get_queued_resource").found["state"] == "PROVISIONING"
    asked = len(world.tpu.calls)
    assert talk.call("get_boot_log").found["phase"] == "waiting"
    # Nobody polls on.
    assert len(world.tpu.calls) - asked == 1


def test_neither_key_nor_token_is_in_any_answer_or_in_the_log(world: World) -> None:
    talk = world.another()
    told = [talk.call(CREATE)]
    world.tpu.tick(to="ACTIVE")
    world.tpu.publish(NODE, stage="STAGE: rust", progress="python 7 s\n")
    key = world.key()
    looks = (
        "get_rig_progress",
        "get_queued_resource",
        "get_boot_log",
        "rig_doctor",
        "check_endpoint",
    )
    told += [talk.call(tool) for tool in looks]
    world.tpu.good_tokens = set()
    told.append(talk.call("get_queued_resource"))
    world.tpu.good_tokens = None
    talk.says = types_name()
    told.append(talk.call(DELETE))
    said = [text for one in told for text in (one.text, json.dumps(one.found), *one.progress)]
    for secret in (key, TOKEN):
        assert not [text for text in (*said, *talk.asked, talk.log) if secret in text]
    assert "Traceback" not in talk.log


def test_stdout_has_nothing_but_the_protocol(world: World) -> None:
    hello = {
        "protocolVersion": "2025-11-25",
        "capabilities": {},
        "clientInfo": {"name": "test", "version": "0"},
    }
    messages = [
        {"jsonrpc": "2.0", "id": 1, "method": "initialize", "params": hello},
        {"jsonrpc": "2.0", "method": "notifications/initialized"},
        {"jsonrpc": "2.0", "id": 2, "method": "tools/call", "params": {"name": "get_queued_resource", "arguments": {}}},
        {"jsonrpc": "2.0", "id": 3, "method": "tools/call", "params": {"name": "check_endpoint", "arguments": {}}},
        {"jsonrpc": "2.0", "id": 4, "method": "nonsense"},
    ]  # fmt: skip
    command = [sys.executable, "-m", "rig.mcp_server"]
    with subprocess.Popen(
        command, cwd=ROOT, env=world.environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL, text=True,
    ) as process:  # fmt: skip
        end = threading.Timer(PATIENCE_SECONDS, process.kill)
        end.start()
        assert process.stdin is not None
        assert process.stdout is not None
        for message in messages:
            process.stdin.write(json.dumps(message) + "\n")
        process.stdin.flush()
        answers: dict[int, Any] = {}
        while len(answers) < 4:
            line = process.stdout.readline()
            assert line, "the server ended"
            answer = json.loads(line)
            assert answer["jsonrpc"] == "2.0"
            answers[answer["id"]] = answer
        process.stdin.close()
        assert process.stdout.read() == ""
        assert process.wait(PATIENCE_SECONDS) == 0
        end.cancel()
    assert answers[2]["result"]["structuredContent"]["phase"] == "absent"
    assert answers[3]["result"]["isError"] is True


def test_the_server_needs_neither_torch_nor_anything_of_the_models_server() -> None:
    code = (
        "import sys, rig.mcp_server\n"
        "print(*{'torch', 'torchtpu_rs', 'server', 'fastapi', 'tokenizers'} & sys.modules.keys())"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60, check=True
    )  # fmt: skip
    assert done.stdout.strip() == ""


def test_settings_are_found_by_name_then_in_the_clients_project_then_in_the_tree(
    tmp_path: Path,
) -> None:
    own = tmp_path / "own"
    own.mkdir()

    def used(**environment: str) -> str:
        return str(settings_file(environment))

    assert used() == str(ROOT / "tpu.env")
    assert used(CLAUDE_PROJECT_DIR=str(own)) == str(ROOT / "tpu.env")
    (own / "tpu.env").touch()
    assert used(CLAUDE_PROJECT_DIR=str(own)) == str(own / "tpu.env")
    assert used(CLAUDE_PROJECT_DIR=str(own), RIG_SETTINGS="/x/y") == "/x/y"
