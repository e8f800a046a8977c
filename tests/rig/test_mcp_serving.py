"""The tools that ask the VM's server, against the real one: the service says that it is at 127.0.0.1, and SERVE_PORT is its port."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

import pytest

from bench.load.published import usd_per_million_tokens
from rig import endpoint
from tests.rig.talk import ERAS, PATIENCE_SECONDS, PROJECT

if TYPE_CHECKING:
    from tests.rig.served import Served
    from tests.rig.talk import Era, World

pytest_plugins = ["tests.rig.served", "tests.rig.talk_fixtures"]

both_eras = pytest.mark.parametrize("era", ERAS)


@pytest.fixture
def vm(world: World, served: Served) -> World:
    """A VM that serves; its key is in Secret Manager."""
    world.settings(SERVE_PORT=served.port, API_KEY_SECRET="rig-key")
    world.tpu.project.secrets[f"projects/{PROJECT}/secrets/rig-key"] = [served.key]
    world.there("ACTIVE")
    return world


def requests_of(served: Served) -> int:
    found = endpoint.check(served.url, served.key)
    assert found.counters is not None
    return found.counters.requests


@both_eras
def test_the_server_on_the_vm_is_asked_what_it_is(vm: World, served: Served, era: Era) -> None:
    told = vm.talk(era).call("check_endpoint")
    assert told.text == f"🟢 {served.url}: It serves gemma4-embedded on cpu."
    assert (told.found["state"], told.found["context"]) == ("serving", 8192)
    assert told.found["counters"]["waiting"] == 0


def test_a_server_that_refuses_the_key_is_told_with_what_to_do(vm: World, served: Served) -> None:
    vm.tpu.project.secrets[f"projects/{PROJECT}/secrets/rig-key"] = ["another-key"]
    talk = vm.talk()
    told = talk.call("check_endpoint")
    assert (told.error, told.found["state"]) == (False, "unauthorized")
    assert told.text.startswith(f"🔴 {served.url}: It refuses the key it got.\n")
    measured = talk.call("run_rust_benchmark")
    assert measured.error
    assert "HTTP 401" in measured.text
    assert "another-key" not in told.text + measured.text + talk.log


def test_a_port_that_is_closed_is_told_by_the_names_of_the_tools(vm: World) -> None:
    vm.settings(SERVE_PORT="9")
    told = vm.talk().call("check_endpoint")
    assert told.found["state"] == "unreachable"
    assert "`get_rig_progress`" in told.text
    assert "`rig_doctor`" in told.text


@both_eras
def test_the_benchmark_tells_each_request_as_it_is_measured_and_what_tokens_cost(
    vm: World, era: Era
) -> None:
    told = vm.talk(era).call("run_rust_benchmark")
    assert not told.error, told.text
    assert (len(told.found["requests"]), len(told.found["streams"])) == (5, 8)
    lines = told.text.splitlines()
    assert told.progress == [*lines[:5], *lines[6:14]]
    assert lines[5].startswith("median decode tok/s ")
    usd = usd_per_million_tokens(0.60, told.found["median_tokens_per_second"])
    assert told.found["usd_per_million_tokens"] == pytest.approx(usd, abs=0.01)
    assert lines[-1] == f"USD per million output tokens {told.found['usd_per_million_tokens']:.2f}"


def test_a_cancelled_benchmark_ends_with_the_request_that_runs(vm: World, served: Served) -> None:
    talk = vm.talk()
    first = threading.Event()
    talk.on_progress = lambda _: first.set()
    before = requests_of(served)
    call = talk.begin("run_rust_benchmark", requests=50, max_tokens=4)
    assert first.wait(PATIENCE_SECONDS)
    call.cancel()
    # Longer than the rest would have taken, for a server that does 50 in a few seconds.
    assert not talk.call("run_rust_benchmark", requests=10, streams=0).error
    assert requests_of(served) - before < 40


def test_the_key_goes_to_the_vm_and_to_this_machine_only(vm: World, served: Served) -> None:
    talk = vm.talk()
    vm.settings(SERVE_PORT="9", API_KEY_SECRET="rig-key")
    for here in (served.url, f"{served.url}/v1", f"http://localhost:{served.port}/"):
        assert talk.call("check_endpoint", url=here).found["state"] == "serving"
    for elsewhere in ("http://203.0.113.5:8000", "http://example.com", "http://127.0.0.1.example.com", "nonsense"):  # fmt: skip
        for tool in ("check_endpoint", "run_rust_benchmark"):
            told = talk.call(tool, url=elsewhere)
            assert told.error
            assert (
                f"expected an address of this machine (http://127.0.0.1:PORT), found {elsewhere}"
                in told.text
            )


def test_without_a_vm_there_is_nobody_to_ask(vm: World) -> None:
    vm.tpu.tick(to="SUSPENDED")
    told = vm.talk().call("check_endpoint")
    assert told.error
    assert "to have an address, found it ended; `get_rig_progress`" in told.text
