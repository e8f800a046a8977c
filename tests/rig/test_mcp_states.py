"""Every state that the service documents, and one that it does not, as the tools tell it; and boots, followed to their end."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

import pytest

from rig.states import STAGES
from tests.rig.talk import ERAS, NAME, NODE, types_name, yes

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.rig.talk import Era, World

pytest_plugins = ["tests.rig.talk_fixtures"]

CREATE, DELETE = "create_tpu_queued_resource", "delete_tpu_queued_resource"

both_eras = pytest.mark.parametrize("era", ERAS)


@pytest.mark.parametrize(
    ("state", "phase", "settled"),
    [
        ("CREATING", "waiting", False),
        ("ACCEPTED", "waiting", False),
        ("WAITING_FOR_RESOURCES", "waiting", False),
        ("PROVISIONING", "waiting", False),
        ("REIMAGINED", "waiting", False),
        ("ACTIVE", "booting", False),
        ("SUSPENDING", "ended", True),
        ("SUSPENDED", "ended", True),
        ("FAILED", "failed", True),
        ("DELETING", "deleting", False),
    ],
)
def test_every_state_is_told_with_its_phase(
    world: World, state: str, phase: str, settled: bool
) -> None:
    talk = world.talk()
    world.there()
    world.tpu.tick(to=state)
    told = talk.call("get_rig_progress")
    assert (told.error, told.found["phase"], told.found["settled"]) == (False, phase, settled)
    # A state that is newer than this rig is a kind of waiting, not an error.
    known = "UNKNOWN" if state == "REIMAGINED" else state
    assert told.found["state"] == known
    resource = talk.call("get_queued_resource")
    assert (resource.found["phase"], resource.found["initiator"]) == (phase, "SERVICE")
    assert [one["state"] for one in resource.found["holding_quota"]] == (
        [state] if state in {"FAILED", "SUSPENDED"} else []
    )


def test_without_a_queued_resource_there_is_none_and_no_error(world: World) -> None:
    talk = world.talk()
    for tool in ("get_rig_progress", "get_queued_resource", "get_boot_log"):
        told = talk.call(tool)
        assert (told.error, told.found["phase"]) == (False, "absent")


@pytest.mark.parametrize(
    ("code", "message", "advice"),
    [
        (8, "There is no more capacity in the zone", "no free chip in us-west4-a"),
        (9, "Insufficient reserved capacity", "The reservation has no free chip"),
        (13, "Internal Error", "ask Google's support to allow the project"),
        (10, "Failed to perform tenant project creation", "Make a new project"),
    ],
)
def test_why_it_failed_is_told_with_what_to_do(
    world: World, code: int, message: str, advice: str
) -> None:
    world.there()
    world.tpu.tick(to="FAILED", code=code, message=message)
    told = world.talk().call("get_queued_resource")
    assert told.found["error"] == message
    assert advice in told.found["advice"]
    assert message in told.text


def test_what_failed_must_go_before_another_is_created(world: World) -> None:
    talk = world.talk()
    talk.call(CREATE)
    world.tpu.tick(to="FAILED")
    freed = 'delete_tpu_queued_resource(queued_resource="gemma4-rust-qr", zone="us-west4-a")'
    assert freed in talk.call("get_queued_resource").text
    refused = talk.call(CREATE)
    assert refused.error
    assert "FAILED and holds quota; `delete_tpu_queued_resource` frees it" in refused.text
    talk.says = types_name()
    assert talk.call(DELETE).found["existed"] is True
    talk.says = lambda _: yes()
    assert talk.call(CREATE).found["already_there"] is False
    assert len(set(world.asked_for())) == 2


def test_a_preempted_or_expired_vm_is_told_with_who_ended_it(world: World) -> None:
    talk = world.talk()
    world.there()
    world.tpu.tick(to="ACTIVE")
    assert talk.call("get_queued_resource").found["address"] == "127.0.0.1"
    world.tpu.tick(to="SUSPENDED")
    told = talk.call("get_queued_resource")
    assert (told.found["initiator"], told.found["address"]) == ("SERVICE", None)
    assert "SUSPENDED, ended, by SERVICE" in told.text
    assert "or it was preempted. It holds quota until `delete_tpu_queued_resource`" in told.text
    assert "`delete_tpu_queued_resource`" in told.found["advice"]
    duration = world.tpu.resources[NAME]["runDuration"]
    duration["terminationTime"] = "2026-11-30T08:00:00Z"
    assert "The 4 h of gemma4-rust-qr were up." in talk.call("get_queued_resource").text
    duration["terminationTime"] = "2999-01-01T08:00:00Z"
    assert "was preempted before its 4 h were up" in talk.call("get_queued_resource").text
    world.tpu.resources[NAME]["state"]["stateInitiator"] = "USER"
    assert "was stopped by somebody who may" in talk.call("get_rig_progress").found["advice"]
    assert "SUSPENDED and holds quota" in talk.call(CREATE).text


@both_eras
def test_a_boot_is_followed_with_progress_until_it_serves(world: World, era: Era) -> None:
    talk = world.talk(era)
    world.there()
    history = ""
    steps: list[Callable[[], object]] = [world.tpu.tick] * 3

    def publish(stage: str) -> Callable[[], None]:
        def step() -> None:
            nonlocal history
            world.tpu.publish(NODE, stage=f"STAGE: {stage}", progress=history)
            history += f"{stage} 7 s\n"

        return step

    steps += [publish(stage) for stage in STAGES]
    steps.append(lambda: world.tpu.publish(NODE, progress=f"{history}DONE"))
    following = iter(steps)

    def time_passes(_: str) -> None:
        for step in itertools.islice(following, 1):
            step()

    talk.on_progress = time_passes
    told = talk.call("get_rig_progress", wait_seconds=1000)
    assert told.found["phase"] == "serving"
    assert told.found["address"] == "127.0.0.1"
    assert [one["name"] for one in told.found["stages"]] == list(STAGES)
    assert told.text.splitlines()[1:-1] == [f"STAGE: {stage} (7 s)" for stage in STAGES]
    assert list(dict.fromkeys(told.progress)) == [
        "CREATING",
        "WAITING_FOR_RESOURCES",
        "PROVISIONING",
        "ACTIVE",
        *(f"STAGE: {stage}" for stage in STAGES),
    ]


def test_waiting_ends_when_its_time_is_over_and_looking_does_not_wait(world: World) -> None:
    talk = world.talk()
    world.there()
    waited = talk.call("get_rig_progress", wait_seconds=0.3)
    assert (waited.found["phase"], waited.found["settled"]) == ("waiting", False)
    assert len(waited.progress) == 6
    assert talk.call("get_rig_progress").progress == []


def test_a_stage_that_failed_is_told_with_the_end_of_its_log(world: World) -> None:
    talk = world.talk()
    world.there()
    world.tpu.tick(to="ACTIVE")
    assert "booting; nothing is published yet" in talk.call("get_boot_log").text
    failure = "FAILED: stage crate, line 7, status 1\nerror: no g++"
    world.tpu.publish(NODE, stage="FAILED: crate", progress=f"python 40 s\n{failure}")
    told = talk.call("get_rig_progress", wait_seconds=1000)
    assert (told.found["phase"], told.found["failure"]) == ("failed", failure)
    assert f"STAGE: python (40 s)\nSTAGE: crate\n{failure}\nThe VM is up and costs" in told.text
    log = talk.call("get_boot_log")
    assert (log.found["failed"], log.found["stage"]) == (True, "FAILED: crate")
    assert "no g++" in log.text
