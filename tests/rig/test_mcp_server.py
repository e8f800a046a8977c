"""The rig's tools as a client meets them: over stdin and stdout, in both eras of the protocol, against the service's real one."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import pytest

from tests.rig.fake_tpu import RefusedError
from tests.rig.talk import ERAS, NAME, PARENT, TOKEN, closes, no, types_name, yes

if TYPE_CHECKING:
    from collections.abc import Callable

    from mcp_types import ElicitResult

    from tests.rig.talk import Era, World

CREATE, DELETE = "create_tpu_queued_resource", "delete_tpu_queued_resource"
TOOLS = {
    CREATE: (False, False),
    "get_rig_progress": (True, False),
    "get_queued_resource": (True, False),
    DELETE: (False, True),
    "find_tpu_capacity": (True, False),
    "estimate_cost": (True, False),
    "rig_doctor": (True, False),
    "get_boot_log": (True, False),
    "check_endpoint": (True, False),
    "run_rust_benchmark": (False, False),
}
"""By name: only looks, and destroys."""
INITIATED = (
    "🚀 Queued Resource gemma4-rust-qr creation initiated in us-west4-a, "
    "serving `xbill9/gemma-4-E2B-it-qat-q4_0-w4a16-ct-text-emb4`."
)
BUSY = RefusedError(503, "UNAVAILABLE", "The service is currently unavailable.")
TOO_FAST = RefusedError(429, "RESOURCE_EXHAUSTED", "Quota exceeded for 'Requests per minute'")
QUOTA = "Quota limit 'TPUV5sPreemptible' has been exceeded. Limit: 0 in zone us-west4-a."

pytest_plugins = ["tests.rig.talk_fixtures"]

both_eras = pytest.mark.parametrize("era", ERAS)


def refuse(error: RefusedError) -> Callable[..., Any]:
    def refused(*_: object) -> None:
        raise error

    return refused


@both_eras
def test_every_tool_has_the_published_name_what_it_does_and_a_typed_result(
    world: World, era: Era
) -> None:
    tools = world.talk(era).tools()
    assert set(tools) == set(TOOLS)
    for name, (looks, destroys) in TOOLS.items():
        tool = tools[name]
        assert tool.annotations is not None
        assert tool.annotations.read_only_hint is looks
        assert tool.annotations.destructive_hint is destroys
        assert tool.title
        assert tool.description
        assert tool.output_schema is not None
        assert tool.output_schema["properties"]
        assert not {"outcome", "ctx"} & set(tool.input_schema["properties"])


@both_eras
def test_a_vm_is_asked_for_once_the_user_has_seen_what_it_costs(world: World, era: Era) -> None:
    talk = world.talk(era)
    told = talk.call(CREATE)
    (question,) = talk.asked
    assert "gemma4-rust-qr (v5litepod-1, flex-start) in us-west4-a" in question
    assert "project my-project" in question
    assert "at most USD 2.40: 4 h at USD 0.60" in question
    assert not told.error
    assert told.text.splitlines()[0] == INITIATED
    assert told.found["name"] == "gemma4-rust-qr"
    assert told.found["already_there"] is False
    assert told.found["price"]["at_most_usd"] == 2.4
    assert any("gemma4-rust-qr" in line for line in told.progress)
    assert world.made() == [NAME]
    assert len(world.asked_for()) == 1


@both_eras
@pytest.mark.parametrize(
    ("says", "why"),
    [
        (no, "the user said no"),
        (closes, "the user closed the question"),
        (lambda _: yes(proceed=False), "the user said no"),
    ],
    ids=["declines", "cancels", "unticks"],
)
def test_nothing_is_created_without_a_yes(
    world: World, era: Era, says: Callable[[str], ElicitResult], why: str
) -> None:
    talk = world.talk(era)
    talk.says = says
    # That a model says so counts for nothing where the user can be asked.
    told = talk.call(CREATE, user_agreed=True)
    assert told.error
    assert f"Nothing was created: {why}" in told.text
    assert len(talk.asked) == 1
    assert world.asked_for() == []


@both_eras
def test_a_client_that_cannot_ask_must_say_that_the_user_agreed(world: World, era: Era) -> None:
    talk = world.talk(era, asks=False)
    told = talk.call(CREATE)
    assert told.error
    assert "at most USD 2.40" in told.text
    assert "user_agreed=true" in told.text
    assert world.asked_for() == []
    assert not talk.call(CREATE, user_agreed=True).error
    told = talk.call(DELETE)
    assert told.error
    assert 'confirm_name="gemma4-rust-qr"' in told.text
    assert "expected the name gemma4-rust-qr" in talk.call(DELETE, confirm_name="other").text
    assert world.made() == [NAME]
    assert talk.call(DELETE, confirm_name="gemma4-rust-qr").found["existed"] is True
    assert world.made() == []


@both_eras
def test_deleting_takes_the_name_typed_by_the_user(world: World, era: Era) -> None:
    talk = world.talk(era)
    talk.call(CREATE)
    for says, why in [
        (types_name("gemma4"), "expected the name gemma4-rust-qr, found 'gemma4'"),
        (types_name(""), "expected the name gemma4-rust-qr, found ''"),
        (no, "the user said no"),
        (closes, "the user closed the question"),
    ]:
        talk.says = says
        told = talk.call(DELETE, confirm_name="gemma4-rust-qr")
        assert told.error
        assert f"Nothing was deleted: {why}" in told.text
    assert world.made() == [NAME]
    talk.says = types_name()
    told = talk.call(DELETE)
    assert told.text == "🗑️ Queued Resource gemma4-rust-qr deletion initiated in us-west4-a."
    assert (world.made(), world.tpu.project.firewalls) == ([], {})


def test_a_way_in_that_takes_its_time_is_waited_for(world: World) -> None:
    world.tpu.project.firewalls.clear()
    world.tpu.project.change = world.slow_changes  # type: ignore[method-assign]
    told = world.talk().call(CREATE)
    assert not told.error
    (rule,) = world.tpu.project.firewalls.values()
    assert rule["sourceRanges"] == ["203.0.113.7/32"]


def test_nobody_is_asked_where_there_is_nothing_to_agree_to(world: World) -> None:
    talk = world.talk()
    assert talk.call(DELETE).found["existed"] is False
    talk.call(CREATE)
    talk.asked.clear()
    again = talk.call(CREATE)
    assert (again.found["already_there"], again.found["differences"]) == (True, [])
    assert "is there already (CREATING); nothing was created" in again.text
    assert talk.asked == []
    assert len(world.asked_for()) == 1
    world.settings(RUNTIME_VERSION="v2-alpha-tpuv5")
    different = talk.call(CREATE).found["differences"]
    assert any("v2-alpha-tpuv5-lite, and would be v2-alpha-tpuv5" in one for one in different)


def test_a_request_that_the_service_still_takes_in_is_neither_asked_again_nor_forgotten(
    world: World,
) -> None:
    talk = world.talk()
    talk.call(CREATE)
    hidden = world.tpu.resources.pop(NAME)
    assert talk.call("get_rig_progress").found["phase"] == "waiting"
    told = talk.call(DELETE)
    assert told.error
    assert "delete it in a minute" in told.text
    talk.asked.clear()
    assert talk.call(CREATE).found["already_there"] is True
    assert talk.asked == []
    world.tpu.resources[NAME] = hidden
    assert len(set(world.asked_for())) == 1


def test_what_is_not_ours_is_neither_adopted_nor_deleted(world: World) -> None:
    talk = world.talk()
    world.there()
    spec = world.tpu.resources[NAME]["tpu"]["nodeSpec"][0]["node"]
    spec["labels"] = {"team": "other"}
    assert "expected gemma4-rust-qr to be ours" in talk.call(CREATE).text
    talk.says = types_name()
    told = talk.call(DELETE)
    assert told.error
    assert "it is left alone" in told.text
    assert world.made() == [NAME]


@pytest.mark.parametrize(
    ("error", "says"),
    [
        (RefusedError(429, "RESOURCE_EXHAUSTED", QUOTA), r"quota TPUV5sPreemptible.* is used up in us-west4-a.*`get_queued_resource`"),
        (RefusedError(429, "RESOURCE_EXHAUSTED", "There is no more capacity in the zone"), "no free chip in us-west4-a"),
        (RefusedError(400, "INVALID_ARGUMENT", "accelerator v5litepod-1 was not found in zone us-west4-a"), "`rig_doctor`"),
    ],
    ids=["quota", "capacity", "no-type"],
)  # fmt: skip
def test_a_request_that_the_service_refuses_is_told_with_what_to_do(
    world: World, monkeypatch: pytest.MonkeyPatch, error: RefusedError, says: str
) -> None:
    monkeypatch.setattr(world.tpu, "create", refuse(error))
    told = world.talk().call(CREATE)
    assert told.error
    assert re.search(says, told.text), told.text
    assert world.made() == []


@pytest.mark.parametrize(
    ("error", "says"),
    [
        (RefusedError(403, "PERMISSION_DENIED", "The caller does not have permission"), "needs roles/tpu.admin"),
        (RefusedError(403, "PERMISSION_DENIED", "Cloud TPU API has not been used in project 1 before or it is disabled"), "gcloud services enable tpu.googleapis.com --project=my-project"),
        (RefusedError(401, "UNAUTHENTICATED", "invalid authentication credentials"), "found one that was refused; set a new one"),
    ],
    ids=["rights", "disabled", "signed-out"],
)  # fmt: skip
def test_an_account_that_is_refused_is_told_what_it_needs(
    world: World, error: RefusedError, says: str
) -> None:
    world.tpu.next_answers = [error]
    told = world.talk().call(CREATE)
    assert told.error
    assert says in told.text
    assert TOKEN not in told.text


def test_flex_start_elsewhere_is_told_with_where_it_is(world: World) -> None:
    world.settings(MAX_COST_USD="20")
    told = world.talk().call(CREATE, zone="europe-west4-b")
    assert told.error
    assert "us-west4" in told.text


@pytest.mark.parametrize("passing", [BUSY, TOO_FAST], ids=["503", "429"])
def test_a_busy_service_is_asked_again_without_anybody_noticing(
    world: World, passing: RefusedError
) -> None:
    talk = world.talk()
    world.there()
    world.tpu.next_answers = [passing]
    told = talk.call("get_rig_progress")
    assert (told.error, told.found["phase"]) == (False, "waiting")
    assert world.tpu.next_answers == []


def test_nothing_is_created_above_the_cap_and_nobody_is_asked(world: World) -> None:
    talk = world.talk()
    told = talk.call(CREATE, hours=24)
    assert told.error
    assert "found at most USD 14.40" in told.text
    assert talk.asked == []
    estimate = talk.call("estimate_cost", hours=24, tokens_per_second=12.2)
    assert estimate.found["allowed"] is False
    assert estimate.found["usd_per_million_tokens"] == 13.66
    assert world.asked_for() == []
    talk.call(CREATE, hours=1.5)
    assert "at most USD 0.90: 1.5 h" in talk.asked[0]
    assert world.tpu.resources[NAME]["runDuration"] == {"maxRunDuration": "5400s"}


def test_arguments_of_a_call_win_over_the_settings(world: World) -> None:
    talk = world.talk()
    told = talk.call(
        CREATE, project="other-project", zone="us-west4-a", queued_resource="second", provisioning_model="spot",
    )  # fmt: skip
    assert not told.error, told.text
    assert "project other-project" in talk.asked[0]
    (name,) = world.made()
    assert name == "projects/other-project/locations/us-west4-a/queuedResources/second"
    assert world.tpu.resources[name]["provisioningModel"] == "SPOT"
    where = {"project": "other-project", "queued_resource": "second"}
    assert talk.call("get_rig_progress", **where).found["state"] == "CREATING"


def test_settings_are_those_of_the_file_when_the_call_comes(world: World) -> None:
    talk = world.talk()
    world.settings(PROJECT_ID="")
    told = talk.call("get_queued_resource")
    assert told.error
    assert "PROJECT_ID: expected a Google Cloud project, found none" in told.text
    world.settings(SERVE_SLOTS="many")
    assert "SERVE_SLOTS" in talk.call("get_queued_resource").text
    world.settings(QUEUED_RESOURCE="renamed")
    assert talk.call("get_queued_resource").found["name"] == "renamed"
    assert "ZONE: " in talk.call("get_queued_resource", zone="mars").text
    world.settings_file.unlink()
    assert "found no such file" in talk.call("get_queued_resource").text


def test_capacity_is_told_by_zone_with_prices_and_creates_nothing(world: World) -> None:
    told = world.talk().call("find_tpu_capacity")
    offers = {(one["zone"], one["provisioning_model"]): one for one in told.found["offers"]}
    assert offers["us-west4-a", "flex-start"]["has_type"] is True
    assert offers["us-west4-a", "flex-start"]["usd_per_hour"] == 0.6
    assert "us-west4-a flex-start: can be asked for, USD 0.60 an hour" in told.text
    assert world.asked_for() == []


def test_the_doctor_tells_each_thing_it_looked_at(world: World) -> None:
    talk = world.talk()
    world.tpu.project.enabled.discard("secretmanager.googleapis.com")
    world.tpu.zones["us-west4-a"].discard("v5litepod-1")
    told = talk.call("rig_doctor")
    findings = told.found["findings"]
    assert told.found["ok"] is all(one["ok"] for one in findings) is False
    assert told.progress == [one["name"] for one in findings]
    for one in findings:
        assert f"{'✅' if one['ok'] else '❌'} {one['name']}: {one['text']}" in told.text
    assert f"{PARENT}" not in told.text
    assert world.asked_for() == []
