"""The shim finds the rig's VM and finds the next one: against Google's API as a service on loopback, and real servers as VMs."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import httpx
import pytest

from demo import places
from demo.places import DOES, LookError, by_the_rig, place_of
from rig.provision import Status
from rig.settings import Settings
from rig.states import STAGES, Node, QueuedResource
from tests.demo.shims import Server, Shim, eventually
from tests.fakes import PATIENCE_SECONDS
from tests.rig.fake_tpu import RefusedError
from tests.rig.talk import NODE, PROJECT
from tests.server.live_server import assert_openai_error

if TYPE_CHECKING:
    from pathlib import Path

    from tests.rig.served import Served
    from tests.rig.talk import World

pytest_plugins = ["tests.rig.served", "tests.rig.talk_fixtures"]

SECRET = f"projects/{PROJECT}/secrets/rig-key"
# For tests in which something changes: in between two looks of theirs, as it is in fifteen seconds of others.
OFTEN = ("--look-seconds", "0.1")


@pytest.fixture
def vm(world: World, served: Served) -> World:
    """A VM that serves; its key is in Secret Manager."""
    world.settings(SERVE_PORT=served.port, API_KEY_SECRET="rig-key")
    world.tpu.project.secrets[SECRET] = [served.key]
    world.there("ACTIVE")
    booted(world)
    return world


def booted(world: World) -> None:
    lines = [f"{name} {second} s, began 2026-12-01T10:00:00Z" for second, name in enumerate(STAGES)]
    world.tpu.publish(NODE, stage="STAGE: serving", progress="\n".join([*lines, "DONE"]))


def move(world: World, address: str) -> None:
    """The VM is another one, at another address."""
    (endpoint,) = world.tpu.nodes[NODE]["networkEndpoints"]
    endpoint["accessConfig"]["externalIp"] = address


def looks(world: World) -> int:
    """How often the service was asked for the VM."""
    return sum(call.path.endswith(f"/nodes/{NODE.rsplit('/', 1)[1]}") for call in world.tpu.calls)


def test_the_vm_is_found_and_its_key_is_added(vm: World, served: Served) -> None:
    with Shim(environment=vm.environment) as shim:
        found = shim.status()
        assert shim.ask("/v1/models").status_code == 200
    assert found.pop("stages") == [[name, f"{DOES[name]}: {n} s"] for n, name in enumerate(STAGES)]
    assert found == {
        "upstream": served.url,
        "kind": "vm",
        "health": 200,
        "queued_resource": "gemma4-rust-qr",
        "zone": "us-west4-a",
        "project": PROJECT,
        "phase": "serving",
        "stage": None,
        "error": None,
    }
    assert served.key not in shim.log + json.dumps(found)


def test_a_new_vm_is_used_without_a_restart(vm: World, served: Served, tmp_path: Path) -> None:
    key = tmp_path / "key"
    key.write_text("the-old-vms-key")
    with Server(str(key), "127.0.0.2", int(served.port)) as old:
        old_url = old.ready()
        move(vm, "127.0.0.2")
        vm.tpu.project.secrets[SECRET] = ["the-old-vms-key"]
        with Shim(*OFTEN, environment=vm.environment) as shim:
            assert shim.status()["upstream"] == old_url
            cut = stream_while(shim, lambda: old.end(9))
            refused = shim.ask("/v1/models")
            message = assert_openai_error(refused, refused.status_code, code="upstream_unreachable")
            assert refused.status_code in {502, 503}
            assert f"laptop → VM: {old_url} took no connection (Connection refused)." in message
            assert shim.status()["health"] is None
            # The next one has a key of its own.
            vm.tpu.project.secrets[SECRET] = [served.key]
            move(vm, "127.0.0.1")
            eventually(lambda: shim.ask("/v1/models").status_code == 200, "the new VM is used")
            assert shim.status()["upstream"] == served.url
            assert shim.status()["error"] is None
    # What the old one had begun does not look whole.
    assert json.loads(cut[-2].removeprefix("data: "))["error"]["code"] == "upstream_failed"
    assert not any('"finish_reason":"' in line for line in cut)


def stream_while(shim: Shim, happens: Any) -> list[str]:
    """The frames of a stream during which something happens."""
    body = {
        "messages": [{"role": "user", "content": "What is a TPU?"}],
        "stream": True,
        "ignore_eos": True,
        "max_tokens": 8000,
    }
    url = f"{shim.url}/v1/chat/completions"
    with httpx.stream("POST", url, json=body, timeout=PATIENCE_SECONDS) as answer:
        frames = (line for line in answer.iter_lines() if line.startswith("data: "))
        first = [next(frames) for _ in range(5)]
        happens()
        return [*first, *frames]


def test_a_server_that_comes_back_is_used_again_without_a_look(
    vm: World, served: Served, tmp_path: Path
) -> None:
    move(vm, "127.0.0.2")
    key = tmp_path / "key"
    key.write_text(served.key)
    with Shim(environment=vm.environment) as shim:
        for _ in range(20):
            assert shim.ask("/v1/models").status_code in {502, 503}
        with Server(str(key), "127.0.0.2", int(served.port)) as server:
            server.ready()
            eventually(lambda: shim.ask("/v1/models").status_code == 200, "it is used again")
    # However many ask while it is away.
    assert looks(vm) == 1


def test_a_key_that_is_refused_is_looked_up_again(vm: World, served: Served) -> None:
    vm.tpu.project.secrets[SECRET] = ["of-the-vm-before"]
    with Shim(*OFTEN, environment=vm.environment) as shim:
        assert_openai_error(shim.ask("/v1/models"), 401, code="invalid_api_key")
        vm.tpu.project.secrets[SECRET] = [served.key]
        eventually(lambda: shim.ask("/v1/models").status_code == 200, "the new key is used")
    assert "of-the-vm-before" not in shim.log


def test_google_is_not_asked_while_the_vm_answers(vm: World) -> None:
    with Shim(environment=vm.environment) as shim:
        before = looks(vm)
        for _ in range(30):
            assert shim.ask("/health").status_code == 200
        assert looks(vm) == before == 1


@pytest.mark.parametrize(
    ("answer", "told"),
    [
        (None, r"nobody is signed in. expected a valid token"),
        (RefusedError(403, "PERMISSION_DENIED", "no access"), r"where the VM is could not be asked"),
    ],
    ids=["token", "access"],
)  # fmt: skip
def test_when_google_refuses_that_hop_is_named(
    vm: World, answer: RefusedError | None, told: str
) -> None:
    if answer is None:
        vm.tpu.good_tokens = set()
    else:
        vm.tpu.next_answers = [answer] * 8
    with Shim(environment=vm.environment) as shim:
        message = assert_openai_error(shim.ask("/v1/models"), 503, code="no_upstream")
        assert message.startswith("laptop → Google: ")
        assert told in message
        assert message == f"{shim.status()['error']} (/shim/status has more.)"
        assert shim.status()["upstream"] is None


def test_a_vm_on_its_way_is_told_with_its_stage(world: World) -> None:
    with Shim(*OFTEN, environment=world.environment) as shim:
        message = assert_openai_error(shim.ask("/v1/models"), 503, code="no_upstream")
        assert "There is no gemma4-rust-qr in us-west4-a, project my-project." in message
        assert shim.status()["phase"] == "absent"
        world.there()
        eventually(lambda: shim.status()["phase"] == "waiting", "it waits for a chip")
        assert "waits for a chip" in shim.ask("/v1/models").json()["error"]["message"]
        world.settings(SERVE_PORT="9")
        world.tpu.tick(to="ACTIVE")
        world.tpu.publish(NODE, stage="STAGE: crate", progress="python 1 s\ntorch 2 s\nrust 3 s\n")
        eventually(lambda: shim.status()["phase"] == "booting", "it boots")
        found = shim.status()
        assert (found["stage"], found["upstream"]) == ("crate", "http://127.0.0.1:9")
        assert found["stages"][2:5] == [
            ["rust", "installing Rust: 3 s"],
            ["crate", "compiling the model"],
            ["weights", "fetching the weights"],
        ]
        assert "It boots: compiling the model." in found["error"]
        world.tpu.publish(NODE, stage="FAILED: crate", progress="FAILED: stage crate\nno compiler")
        eventually(lambda: shim.status()["phase"] == "failed", "it failed")
        assert "no compiler" in shim.status()["error"]


# -- places ----------------------------------------------------------------------------------------------


@pytest.fixture
def without_project(tmp_path: Path) -> Path:
    file = tmp_path / "tpu.env"
    file.write_text("PROJECT_ID=\n")
    return file


def test_without_a_project_a_server_on_this_machine_is_used(
    without_project: Path, served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(places, "LOCAL", served.url)
    found = by_the_rig(without_project, "key")()
    assert (found.kind, found.url, found.key, found.problem) == ("url", served.url, "key", None)
    assert "key=" not in repr(found)
    # As it is where the package is installed without the tree.
    assert by_the_rig(without_project / "none", "key")() == found
    monkeypatch.setattr(places, "LOCAL", "http://127.0.0.1:9")
    found = by_the_rig(without_project)()
    assert found.url is None
    assert "expected a project, --url or a server at http://127.0.0.1:9" in (found.problem or "")


def test_settings_that_are_wrong_are_told(without_project: Path) -> None:
    without_project.write_text("PROJECT_ID=p\nZONES=x\n")
    with pytest.raises(LookError, match=r"tpu\.env has no such setting"):
        by_the_rig(without_project)()
    without_project.unlink()
    with pytest.raises(LookError, match=r"expected the settings in .*tpu\.env, found no such file"):
        by_the_rig(without_project, project_id="p")()


def test_where_no_port_is_open_the_tunnel_is_used() -> None:
    node = Node(name="n", network_endpoints=[{"accessConfig": {"externalIp": "192.0.2.1"}}])
    resource = QueuedResource.model_validate({
        "name": "projects/p/locations/us-west4-a/queuedResources/q", "state": {"state": "ACTIVE"}
    })  # fmt: skip
    settings = Settings(project_id="p")
    assert place_of(settings, Status(resource, node), "k").url == "http://192.0.2.1:8000"
    through = settings.model_copy(update={"access": "iap"})
    assert place_of(through, Status(resource, node), "k").url == "http://127.0.0.1:18000"


def test_every_stage_of_a_boot_is_told_in_words() -> None:
    assert tuple(DOES) == STAGES
