"""Several VMs: one confirmation of their cost, one key for all, and nothing left behind that is still paid for."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING, Any

import pytest

from rig.api import TpuApi
from rig.bundle import Bundle
from rig.cost import PRICES_OF, Cost, CostError
from rig.fleet import Fleet, FleetError
from rig.google import Google
from rig.provision import Rig
from rig.records import Record
from rig.session import Session
from rig.settings import Settings
from rig.surroundings import Surroundings
from tests.rig.fake_tpu import FakeTpu, RefusedError, rest_door, services

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

PARENT = "projects/my-project/locations/us-west4-a"
NO_QUOTA = RefusedError(
    429,
    "RESOURCE_EXHAUSTED",
    "Quota limit 'TPUV5sPreemptible' has been exceeded. Limit: 2 in zone us-west4-a.",
)


class Tokens:
    """One for everything."""

    def token(self, *, fresh: bool = False) -> str:
        return "token"


class World:
    """The project, and who has fleets in it."""

    def __init__(self, tpu: FakeTpu, google: Google, folder: Path) -> None:
        self.tpu, self.google, self.folder = tpu, google, folder
        self.packed = 0

    def session(self, **changed: Any) -> Session:
        """As a process that begins now has it."""
        given = {"project_id": "my-project", "max_cost_usd": 20, "queued_resource": "gemma"}
        settings = Settings(**{**given, **changed})
        api, record = TpuApi(self.google), Record(settings, self.folder)
        surroundings = Surroundings(self.google, settings, record)
        rig = Rig(settings, api, record, prepare=surroundings.prepare, pack=self.pack)
        return Session(settings, self.google, api, surroundings, rig)

    def fleet(self, replicas: int, **changed: Any) -> Fleet:
        session = self.session(**changed)
        return Fleet(session, replicas, folder=self.folder, pack=self.pack)

    def pack(self) -> Bundle:
        self.packed += 1
        return Bundle("crate", "server", "hash")

    def names(self) -> list[str]:
        return sorted(name.rsplit("/", 1)[1] for name in self.tpu.resources)

    def metadata(self, name: str) -> dict[str, str]:
        node = self.tpu.resources[f"{PARENT}/queuedResources/{name}"]["tpu"]["nodeSpec"][0]["node"]
        found: dict[str, str] = node["metadata"]
        return found

    def serve(self, name: str, address: str) -> None:
        """The VM's boot is over."""
        node = f"{PARENT}/nodes/{name}-node"
        self.tpu.publish(node, stage="STAGE: serving", progress="serving 9 s\nDONE")
        self.tpu.nodes[node]["networkEndpoints"][0]["accessConfig"]["externalIp"] = address

    def asked(self, method: str, part: str) -> int:
        return sum(call.method == method and part in call.path for call in self.tpu.calls)


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    tpu = FakeTpu()
    with rest_door(tpu) as door, Google(Tokens(), sleep=lambda _: None) as google:
        for key, value in services(door).items():
            monkeypatch.setenv(key, value)
        yield World(tpu, google, tmp_path)


def test_every_vm_has_its_own_name_and_all_have_one_key(world: World) -> None:
    world.fleet(3).create()
    assert world.names() == ["gemma-0", "gemma-1", "gemma-2"]
    keys = {world.metadata(name)["api-key"] for name in world.names()}
    assert keys == {world.fleet(3).api_key()}
    for name in world.names():
        assert f"QUEUED_RESOURCE={name}\n" in world.metadata(name)["settings"]
    # Packing takes a second.
    assert world.packed == 1


def test_creating_again_creates_what_is_missing_with_the_same_key(world: World) -> None:
    world.fleet(3).create()
    key = world.fleet(3).api_key()
    del world.tpu.resources[f"{PARENT}/queuedResources/gemma-1"]
    world.tpu.requests.clear()
    world.fleet(3).create()
    assert world.names() == ["gemma-0", "gemma-1", "gemma-2"]
    assert world.asked("POST", "/queuedResources") == 4
    assert world.metadata("gemma-1")["api-key"] == key


def test_nothing_is_asked_for_when_all_together_cost_too_much(world: World) -> None:
    with pytest.raises(CostError, match=r"found 3 VMs, each at most USD 2\.40"):
        world.fleet(3, max_cost_usd=7).create()
    assert world.names() == []
    assert world.asked("POST", "") == 0


def test_vms_of_a_larger_fleet_that_are_still_there_count_for_the_cost(world: World) -> None:
    world.fleet(3).create()
    with pytest.raises(CostError, match="found 3 VMs"):
        world.fleet(2, max_cost_usd=5).create()


def test_what_could_not_be_had_is_told_with_what_is_there(world: World) -> None:
    original = world.tpu.create
    left = [2]

    def create(*arguments: Any) -> dict[str, Any]:
        if not left[0]:
            raise NO_QUOTA
        left[0] -= 1
        return original(*arguments)

    world.tpu.create = create  # type: ignore[method-assign]
    with pytest.raises(
        FleetError,
        match=r"^gemma-0, gemma-1 of 4 are there; gemma-2 is not: .*quota TPUV5sPreemptible of 2 is used up",
    ):
        world.fleet(4).create()
    assert world.names() == ["gemma-0", "gemma-1"]
    left[0] = 2
    world.fleet(4).create()
    assert len(world.names()) == 4


def test_names_that_would_be_too_long_are_refused_before_anything_is_asked(world: World) -> None:
    with pytest.raises(FleetError, match="set a shorter QUEUED_RESOURCE"):
        world.fleet(11, queued_resource="g" * 56)
    world.fleet(10, queued_resource="g" * 56)
    with pytest.raises(FleetError, match="at least one replica, found 0"):
        world.fleet(0)
    assert world.tpu.calls == []


def test_statuses_name_every_vm_and_those_that_a_larger_fleet_left(world: World) -> None:
    world.fleet(3).create()
    world.tpu.tick(to="ACTIVE")
    world.serve("gemma-1", "203.0.113.1")
    found = [(name, status.phase) for name, status in world.fleet(2).statuses()]
    assert found == [("gemma-0", "booting"), ("gemma-1", "serving"), ("gemma-2", "booting")]
    assert [status.phase for _, status in world.fleet(1, queued_resource="other").statuses()] == [
        "absent"
    ]


def test_a_vm_of_such_a_name_in_another_zone_is_none_of_the_fleet(world: World) -> None:
    price = Cost(0.6, timedelta(hours=4), PRICES_OF)
    other = world.session(
        queued_resource="gemma-5", zone="us-east1-c", provisioning_model="on-demand"
    )
    assert other.rig.create(price) is not None
    world.fleet(1).create()
    assert [name for name, _ in world.fleet(1).statuses()] == ["gemma-0"]
    assert world.fleet(1).delete() == ["gemma-0"]
    # It is ours all the same, and needs the way in.
    assert world.tpu.project.firewalls


def test_addresses_are_those_of_the_vms_that_serve(world: World) -> None:
    world.fleet(3).create()
    assert world.fleet(3).addresses() == []
    world.tpu.tick(to="ACTIVE")
    world.serve("gemma-0", "203.0.113.1")
    world.serve("gemma-2", "203.0.113.2")
    addresses = world.fleet(3, serve_port=8123).addresses()
    assert addresses == ["http://203.0.113.1:8123", "http://203.0.113.2:8123"]
    world.tpu.tick(to="SUSPENDED")
    assert world.fleet(3).addresses() == []


def test_vms_without_an_open_port_have_no_addresses(world: World) -> None:
    with pytest.raises(FleetError, match=r"ACCESS=iap: open a tunnel to each .* --worker"):
        world.fleet(3, access="iap").addresses()


def test_deleting_leaves_nothing_however_many_are_named(world: World) -> None:
    world.fleet(3).create()
    world.tpu.tick(to="ACTIVE")
    assert world.tpu.project.firewalls
    assert world.fleet(1).delete() == ["gemma-0", "gemma-1", "gemma-2"]
    assert world.names() == []
    assert world.fleet(3).api_key() is None
    assert not world.tpu.project.firewalls
    assert not list(world.folder.rglob("api-key"))
    assert world.fleet(3).delete() == []


def test_deleting_a_fleet_leaves_others_their_vm_their_key_and_the_way_in(world: World) -> None:
    single = world.session()
    single.rig.create()
    other = world.session(queued_resource="gemma-eu")
    other.rig.create()
    key = single.surroundings.api_key()
    world.fleet(2).create()
    assert world.fleet(2).api_key() != key
    assert world.fleet(2).delete() == ["gemma-0", "gemma-1"]
    assert world.names() == ["gemma", "gemma-eu"]
    assert world.session().surroundings.api_key() == key
    assert world.tpu.project.firewalls
    # And the other way round: a single VM that goes takes no fleet's key with it.
    world.fleet(2).create()
    world.session().rig.delete()
    assert world.fleet(2).api_key() == world.metadata("gemma-0")["api-key"]


def test_what_could_not_be_deleted_is_named_and_the_key_is_kept(world: World) -> None:
    world.fleet(3).create()
    labels = world.tpu.resources[f"{PARENT}/queuedResources/gemma-1"]["tpu"]["nodeSpec"][0]["node"]
    labels["labels"] = {"team": "other"}
    with pytest.raises(
        FleetError, match=r"^gemma-0, gemma-2 are deleted; not deleted: gemma-1 \(.*left alone\)"
    ):
        world.fleet(3).delete()
    assert world.names() == ["gemma-1"]
    assert world.fleet(3).api_key()


def test_a_key_in_secret_manager_is_the_fleets_too(world: World) -> None:
    fleet = world.fleet(2, api_key_secret="rig-key")
    fleet.create()
    assert "api-key" not in world.metadata("gemma-0")
    assert fleet.api_key() == world.tpu.project.secrets["projects/my-project/secrets/rig-key"][-1]
