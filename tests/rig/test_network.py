"""One way in, for those who were named, and nothing touched that somebody else made."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from rig.google import Google, GoogleError
from rig.network import OURS, Firewall, NetworkError, my_address
from rig.settings import Settings
from tests.rig.fake_tpu import FakeTpu, RefusedError, rest_door, services

if TYPE_CHECKING:
    from collections.abc import Iterator

RULES = "projects/my-project/global/firewalls"
DIRECT, IAP = f"{RULES}/gemma4-rust-8000", f"{RULES}/gemma4-rust-iap"


class Tokens:
    """One for everything."""

    def token(self, *, fresh: bool = False) -> str:
        return "token"


class World:
    """The project, and whoever opens a way into it."""

    def __init__(self, tpu: FakeTpu, google: Google) -> None:
        self.tpu, self.google = tpu, google
        self.rules = tpu.project.firewalls
        self.pauses: list[float] = []

    def firewall(self, **changed: Any) -> Firewall:
        settings = Settings(project_id="my-project", **changed)
        return Firewall(self.google, settings, sleep=self.pauses.append)

    def changes(self) -> list[str]:
        return [call.method for call in self.tpu.calls if call.method != "GET"]


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    tpu = FakeTpu()
    with rest_door(tpu) as door, Google(Tokens(), sleep=lambda _: None) as google:
        for key, value in services(door).items():
            monkeypatch.setenv(key, value)
        yield World(tpu, google)


def test_the_port_is_opened_to_this_machine_alone_and_only_for_tagged_vms(world: World) -> None:
    firewall = world.firewall()
    assert firewall.rule() is None
    assert firewall.open().sources == ("203.0.113.7/32",)
    assert firewall.rule() == firewall.wanted()
    rule = world.rules[DIRECT]
    assert rule["sourceRanges"] == ["203.0.113.7/32"]
    assert rule["targetTags"] == ["tpu-rust"]
    assert rule["allowed"] == [{"IPProtocol": "tcp", "ports": ["8000"]}]
    assert rule["direction"] == "INGRESS"
    assert rule["network"].endswith("projects/my-project/global/networks/default")
    assert set(world.rules) == {DIRECT}


def test_opening_again_changes_nothing(world: World) -> None:
    world.firewall().open()
    world.firewall().open()
    assert world.changes() == ["POST"]


def test_another_address_port_tag_or_network_corrects_the_rule(world: World) -> None:
    world.firewall().open()
    world.tpu.callers_address = "198.51.100.9"
    world.firewall().open()
    assert world.rules[DIRECT]["sourceRanges"] == ["198.51.100.9/32"]
    world.firewall(network_tags="one two", source_range="203.0.113.0/24").open()
    assert world.rules[DIRECT]["targetTags"] == ["one", "two"]
    assert world.rules[DIRECT]["sourceRanges"] == ["203.0.113.0/24"]
    world.rules[DIRECT]["disabled"] = True
    world.firewall().open()
    assert world.rules[DIRECT]["disabled"] is False
    world.rules[DIRECT]["allowed"].append({"IPProtocol": "tcp"})
    world.firewall().open()
    assert world.rules[DIRECT]["allowed"] == [{"IPProtocol": "tcp", "ports": ["8000"]}]
    assert world.changes() == ["POST", "PATCH", "PATCH", "PATCH", "PATCH"]
    # A rule cannot change its network.
    world.tpu.project.networks.add("other")
    world.firewall(network="other").open()
    assert world.rules[DIRECT]["network"].endswith("/networks/other")
    assert world.changes()[-2:] == ["DELETE", "POST"]


def test_a_shared_network_has_its_rule_where_the_network_is(world: World) -> None:
    world.tpu.project.networks.add("shared")
    world.firewall(network="projects/host/global/networks/shared").open()
    assert set(world.rules) == {"projects/host/global/firewalls/gemma4-rust-8000"}


def test_through_the_proxy_nobody_but_it_reaches_the_vm(world: World) -> None:
    world.firewall().open()
    rule = world.firewall(access="iap").open()
    assert (rule.sources, rule.ports) == (("35.235.240.0/20",), ("tcp:22",))
    assert set(world.rules) == {IAP}
    world.firewall().open()
    assert set(world.rules) == {DIRECT}


def test_the_whole_internet_is_let_in_only_when_the_settings_say_so(world: World) -> None:
    assert world.firewall(source_range="0.0.0.0/0").open().sources == ("0.0.0.0/0",)
    world.tpu.callers_address = "0.0.0.0/0"
    with pytest.raises(NetworkError, match="set SOURCE_RANGE"):
        world.firewall().open()


def test_a_rule_of_our_name_that_somebody_else_made_is_left_alone(world: World) -> None:
    theirs = {
        "name": "gemma4-rust-8000", "description": "for the other team", "sourceRanges": ["10.0.0.0/8"],
        "network": "https://www.googleapis.com/compute/v1/projects/my-project/global/networks/default",
    }  # fmt: skip
    world.rules[DIRECT] = dict(theirs)
    world.rules[IAP] = {**theirs, "name": "gemma4-rust-iap"}
    with pytest.raises(NetworkError, match="one that is not; it is left alone"):
        world.firewall().open()
    assert not world.firewall().close()
    assert world.changes() == []
    assert world.rules[DIRECT] == theirs


def test_closing_deletes_what_is_ours_and_says_whether_there_was_anything(world: World) -> None:
    world.firewall().open()
    assert world.rules[DIRECT]["description"] == OURS
    assert world.firewall().close()
    assert world.rules == {}
    assert not world.firewall().close()


def test_a_change_is_waited_for_and_its_error_told(world: World) -> None:
    world.tpu.project.operation_error = "Quota 'FIREWALLS' exceeded. Limit: 100.0 globally."
    with pytest.raises(NetworkError, match=r"found: Quota 'FIREWALLS' exceeded"):
        world.firewall().open()
    assert world.pauses == [0.2, 0.4]
    assert world.rules == {}


def test_a_change_that_never_ends_is_not_waited_for_forever(world: World) -> None:
    firewall = world.firewall()
    stuck = world.tpu.project.operation
    world.tpu.project.operation = lambda name: {**stuck(name), "status": "RUNNING"}  # type: ignore[method-assign]
    with pytest.raises(NetworkError, match="in 120 s, found it RUNNING; try again"):
        firewall.open()
    assert 120 <= sum(world.pauses) < 126


def test_a_change_whose_answer_was_lost_is_asked_again_as_the_same(world: World) -> None:
    world.tpu.next_answers = [None, RefusedError(503, "", "Backend error")]
    world.firewall().open()
    ids = [call.query["requestId"] for call in world.tpu.calls if call.method == "POST"]
    assert len(ids) == 2
    assert len(set(ids)) == 1


@pytest.mark.parametrize("answer", ["2001:db8::1", "localhost", None, 7.5])
def test_an_address_that_is_none_is_an_error_that_says_what_to_set(
    world: World, answer: object
) -> None:
    assert str(my_address()) == "203.0.113.7"
    world.tpu.callers_address = answer
    with pytest.raises(NetworkError, match="set SOURCE_RANGE"):
        my_address()


def test_an_address_service_that_cannot_be_reached_says_what_to_set(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("IPIFY_API_ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(NetworkError, match=r"from http://127.0.0.1:9, found .*set SOURCE_RANGE"):
        my_address()
    assert world.firewall(source_range="203.0.113.7/32").open()


def test_without_a_tag_no_port_is_opened(world: World) -> None:
    with pytest.raises(NetworkError, match="NETWORK_TAGS"):
        world.firewall(network_tags="").open()
    assert world.rules == {}


def test_a_project_that_is_not_there_is_not_taken_for_a_missing_rule(world: World) -> None:
    world.tpu.next_answers = [RefusedError(404, "", "The resource 'projects/p' was not found")]
    with pytest.raises(GoogleError, match="projects/p"):
        world.firewall().rule()
