"""One VM, created once, whatever happens on the way; and nothing touched that is not ours."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import httpx
import pytest

from rig.api import TpuApi
from rig.bundle import Bundle
from rig.cost import CostError
from rig.google import ATTEMPTS, Google, GoogleError, UnreachableError
from rig.plan import gcloud, plan
from rig.provision import Rig, RigError
from rig.records import Record
from rig.settings import Settings
from rig.states import State
from tests.rig.fake_tpu import Door, FakeTpu, RefusedError, rest_door

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

OURS = Settings(project_id="my-project")
NAME = "projects/my-project/locations/us-west4-a/queuedResources/gemma4-rust-qr"
NODE = "projects/my-project/locations/us-west4-a/nodes/gemma4-rust-qr-node"
BUSY = RefusedError(503, "UNAVAILABLE", "The service is currently unavailable.")
TOO_FAST = RefusedError(
    429, "RESOURCE_EXHAUSTED", "Quota exceeded for quota metric 'Requests' per minute"
)
NO_QUOTA = RefusedError(
    429,
    "RESOURCE_EXHAUSTED",
    "Quota limit 'TPUV5sPreemptible' has been exceeded. Limit: 0 in zone us-west4-a.",
)


class Tokens:
    """Gives `old` until a fresh one is asked for."""

    def __init__(self) -> None:
        self.asked: list[bool] = []

    def token(self, *, fresh: bool = False) -> str:
        self.asked.append(fresh)
        return "new" if True in self.asked else "old"


class World:
    """The service, a client of it, and a rig."""

    def __init__(self, door: Door, tpu: FakeTpu, folder: Path) -> None:
        self.tpu, self.folder, self.door = tpu, folder, door
        self.pauses: list[float] = []
        self.tokens = Tokens()
        self.open = contextlib.ExitStack()

    def api(self) -> TpuApi:
        return TpuApi(self.open.enter_context(Google(self.tokens, sleep=self.pauses.append)))

    def rig(self, settings: Settings = OURS, **options: Any) -> Rig:
        """As a process that begins now has it."""
        record = Record(settings, self.folder)
        options.setdefault("sleep", self.pauses.append)
        options.setdefault("prepare", record.api_key)
        return Rig(
            settings, self.api(), record, pack=lambda: Bundle("crate", "server", "hash"), **options
        )

    def made(self) -> int:
        return len(self.tpu.resources)


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    tpu = FakeTpu()
    with rest_door(tpu) as door:
        monkeypatch.setenv("TPU_API_ENDPOINT", f"http://{door.address}")
        monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
        found = World(door, tpu, tmp_path)
        with found.open:
            yield found


def test_the_request_has_what_flex_start_needs_and_the_service_knows_every_field(
    world: World,
) -> None:
    created = world.rig().create()
    assert created is not None
    assert (created.state, created.is_ours, created.nodes) == (State.CREATING, True, [NODE])
    resource = world.tpu.resources[NAME]
    assert resource["provisioningModel"] == "FLEX_START"
    assert resource["runDuration"] == {"maxRunDuration": "14400s"}
    assert resource["queueingPolicy"] == {"validUntilDuration": "7200s"}
    node = resource["tpu"]["nodeSpec"][0]["node"]
    assert (node["acceleratorType"], node["runtimeVersion"]) == (
        "v5litepod-1",
        "v2-alpha-tpuv5-lite",
    )
    assert node["tags"] == ["tpu-rust"]
    assert set(node["metadata"]) == {
        "enable-guest-attributes",
        "startup-script",
        "settings",
        "bundle-crate",
        "bundle-server",
        "bundle-sha256",
        "api-key",
    }


def test_every_provisioning_model_is_a_request_that_the_service_accepts(world: World) -> None:
    for model, wanted in (("spot", "SPOT"), ("on-demand", None), ("reserved", None)):
        settings = Settings(project_id="p", provisioning_model=model, queued_resource=f"a-{model}")
        assert world.rig(settings).create() is not None
        body = world.tpu.resources[f"{settings.parent}/queuedResources/a-{model}"]
        assert body.get("provisioningModel") == wanted


def test_creating_again_adopts_what_is_there(world: World) -> None:
    for _ in range(3):
        assert world.rig().create() is not None
        world.tpu.tick()
    assert world.made() == 1
    assert [call.method for call in world.tpu.calls].count("POST") == 1


def test_what_an_adopted_vm_has_otherwise_is_told(world: World) -> None:
    created = world.rig().create()
    assert created is not None
    assert world.rig().differences(created) == []
    changed = Settings(project_id="my-project", serve_context=4096, runtime_version="v2-other")
    assert world.rig(changed).differences(created) == [
        "runtimeVersion is v2-alpha-tpuv5-lite, and would be v2-other",
        "RUNTIME_VERSION is v2-alpha-tpuv5-lite, and would be v2-other",
        "SERVE_CONTEXT is 8192, and would be 4096",
    ]


def test_a_process_killed_between_asking_and_hearing_creates_nothing_twice(world: World) -> None:
    world.tpu.lost_answers = ATTEMPTS + 1
    with pytest.raises(UnreachableError):
        world.rig().create()
    assert world.made() == 1
    # Not yet visible to `get`, and asked for again by the next process: the same request.
    hidden = world.tpu.resources.pop(NAME)
    world.tpu.lost_answers = 0
    assert world.rig().status().phase == "absent"
    assert world.rig().create() is None
    assert world.made() == 0
    world.tpu.resources[NAME] = hidden
    assert world.rig().create() is not None
    ids = {call.query["requestId"] for call in world.tpu.calls if call.method == "POST"}
    assert len(ids) == 1


def test_a_creation_that_takes_its_time_is_waiting_and_not_absent(world: World) -> None:
    rig = world.rig()
    rig.create()
    made = world.tpu.resources.pop(NAME)
    assert (rig.status().phase, rig.status().is_settled) == ("waiting", False)
    world.tpu.resources[NAME] = made
    world.tpu.tick()
    assert rig.status().resource is not None


def test_a_creation_that_fails_later_is_told_once_and_the_next_try_is_another(
    world: World,
) -> None:
    rig = world.rig()
    rig.create()
    key = rig.record.known_api_key()
    del world.tpu.resources[NAME]
    for operation in world.tpu.operations.values():
        error = {"code": 8, "message": "Quota limit 'TPUV5s' has been exceeded. Limit: 0"}
        operation.update(done=True, error=error)
    with pytest.raises(RigError, match="quota TPUV5s of 0 is used up"):
        rig.status()
    assert rig.status().phase == "absent"
    assert rig.create() is not None
    assert rig.record.known_api_key() == key
    posts = [call.query["requestId"] for call in world.tpu.calls if call.method == "POST"]
    assert len(set(posts)) == 2


def test_after_deleting_the_next_request_is_another(world: World) -> None:
    rig = world.rig()
    rig.create()
    key = rig.record.known_api_key()
    assert rig.delete()
    assert not rig.delete()
    assert rig.record.known_api_key() is None
    rig.create()
    posts = [call.query["requestId"] for call in world.tpu.calls if call.method == "POST"]
    assert len(set(posts)) == 2
    assert rig.record.known_api_key() != key


def test_the_key_is_in_a_file_that_only_the_user_can_read_and_in_no_text(world: World) -> None:
    rig = world.rig()
    created = rig.create()
    key = rig.record.known_api_key()
    assert key
    (file,) = world.folder.rglob("api-key")
    assert file.stat().st_mode & 0o777 == 0o600
    assert file.parent.stat().st_mode & 0o777 == 0o700
    assert key not in f"{rig.settings!r} {gcloud(rig.settings)}"
    assert created is not None


def test_a_key_that_is_kept_elsewhere_does_not_travel_in_metadata(world: World) -> None:
    rig = world.rig(prepare=lambda: None)
    rig.create()
    assert rig.record.known_api_key() is None
    assert "api-key" not in world.tpu.resources[NAME]["tpu"]["nodeSpec"][0]["node"]["metadata"]


def test_what_is_on_its_way_is_neither_deleted_as_absent_nor_adopted_while_it_goes(
    world: World,
) -> None:
    rig = world.rig()
    rig.create()
    made = world.tpu.resources.pop(NAME)
    with pytest.raises(RigError, match="is being created and does not show yet"):
        rig.delete()
    world.tpu.resources[NAME] = made
    world.tpu.tick(to="DELETING")
    with pytest.raises(RigError, match="is being deleted; create it again when it is gone"):
        rig.create()


def test_what_is_not_labelled_ours_is_neither_adopted_nor_deleted(world: World) -> None:
    world.rig().create()
    world.tpu.resources[NAME]["tpu"]["nodeSpec"][0]["node"]["labels"] = {"team": "other"}
    with pytest.raises(RigError, match="expected gemma4-rust-qr to be ours"):
        world.rig().create()
    with pytest.raises(RigError, match="left alone"):
        world.rig().delete()
    assert world.made() == 1


def test_nothing_is_asked_for_that_could_cost_too_much(world: World) -> None:
    with pytest.raises(CostError):
        world.rig(Settings(project_id="p", max_run_duration="2d")).create()
    assert world.tpu.calls == []


@pytest.mark.parametrize("passing", [BUSY, TOO_FAST])
def test_a_busy_service_is_asked_again_after_growing_random_pauses(
    world: World, passing: RefusedError
) -> None:
    world.tpu.next_answers = [passing, passing, passing]
    assert world.rig().create() is not None
    assert len(world.pauses) == 3
    assert 0.4 < world.pauses[0] <= 1.0 <= world.pauses[2] <= 4.0
    world.tpu.next_answers = [passing] * ATTEMPTS
    with pytest.raises(RigError, match=passing.status):
        world.rig().status()


def test_a_used_up_quota_is_not_asked_again_and_is_told_with_its_name(world: World) -> None:
    world.tpu.next_answers = [None, NO_QUOTA]
    with pytest.raises(
        RigError, match=r"TPUV5sPreemptible of 0 is used up .*quotas\?project=my-project"
    ):
        world.rig().create()
    assert world.pauses == []


def test_a_refusal_for_good_makes_the_next_try_another_request(world: World) -> None:
    wrong = Settings(project_id="p", zone="us-west4-b")
    with pytest.raises(RigError, match="us-west4-a"):
        world.rig(wrong).create()
    with pytest.raises(RigError, match="us-west4-a"):
        world.rig(wrong).create()
    posts = [call.query["requestId"] for call in world.tpu.calls if call.method == "POST"]
    assert len(set(posts)) == 2


def test_a_token_that_ended_is_renewed_once(world: World) -> None:
    world.tpu.good_tokens = {"new"}
    assert world.rig().create() is not None
    assert world.tokens.asked[:2] == [False, True]
    world.tpu.good_tokens = set()
    with pytest.raises(RigError, match="gcloud auth application-default login"):
        world.rig().status()


def test_a_service_that_does_not_answer_is_an_error_that_names_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("TPU_API_ENDPOINT", "http://127.0.0.1:9")
    with (
        Google(Tokens(), sleep=lambda _: None) as google,
        pytest.raises(UnreachableError, match=r"an answer from 127.0.0.1"),
    ):
        TpuApi(google).get(NAME)


def test_a_proxys_page_is_no_crash() -> None:
    page = httpx.MockTransport(lambda _: httpx.Response(403, text="<html>Forbidden</html>"))
    with (
        Google(Tokens(), transport=page) as google,
        pytest.raises(GoogleError, match="HTTP 403: <html>Forbidden"),
    ):
        TpuApi(google).get(NAME)


def test_every_state_has_its_phase_and_one_that_nobody_knows_is_waiting(world: World) -> None:
    rig = world.rig()
    assert rig.status().phase == "absent"
    rig.create()
    for state, phase in {
        "CREATING": "waiting",
        "ACCEPTED": "waiting",
        "WAITING_FOR_RESOURCES": "waiting",
        "PROVISIONING": "waiting",
        "REIMAGINED": "waiting",
        "ACTIVE": "booting",
        "SUSPENDING": "ended",
        "SUSPENDED": "ended",
        "FAILED": "failed",
        "DELETING": "deleting",
    }.items():
        world.tpu.tick(to=state)
        status = rig.status()
        assert (status.phase, status.is_settled) == (phase, phase in {"ended", "failed"})


def test_a_boot_is_followed_from_the_queue_to_serving(world: World) -> None:
    rig = world.rig()
    rig.create()
    steps = iter(
        [
            world.tpu.tick,
            world.tpu.tick,
            world.tpu.tick,
            lambda: world.tpu.publish(NODE, stage="STAGE: crate", progress="python 40 s\n"),
            lambda: world.tpu.publish(
                NODE, stage="STAGE: serving", progress="python 40 s\nserving 9 s\nDONE"
            ),
        ]
    )

    def time_passes(seconds: float) -> None:
        world.pauses.append(seconds)
        next(steps)()

    seen = list(world.rig(sleep=time_passes).watch(600))
    assert [status.phase for status in seen] == [
        "waiting",
        "waiting",
        "waiting",
        "booting",
        "booting",
        "serving",
    ]
    assert [status.boot.stage for status in seen][-3:] == [None, "STAGE: crate", "STAGE: serving"]
    assert seen[-1].node is not None
    assert seen[-1].node.external_ip == "127.0.0.1"
    assert seen[-1].node.ends_at is not None
    # Ten queries a minute are allowed, two a poll.
    assert min(world.pauses) >= 12


def test_a_stage_that_failed_ends_the_wait_with_the_end_of_its_log(world: World) -> None:
    rig = world.rig()
    rig.create()
    world.tpu.tick(to="ACTIVE")
    world.tpu.publish(
        NODE, stage="FAILED: crate", progress="FAILED: stage crate, line 7, status 1\nerror: no g++"
    )
    (status,) = rig.watch(600)
    assert (status.phase, status.boot.failed) == ("failed", True)
    assert "no g++" in status.boot.progress


def test_waiting_ends_when_its_time_is_over(world: World) -> None:
    rig = world.rig()
    rig.create()
    assert [status.phase for status in rig.watch(60)] == ["waiting"]
    assert sum(world.pauses) == 60


def test_what_failed_or_ended_is_told_as_holding_quota_and_must_be_deleted_first(
    world: World,
) -> None:
    rig = world.rig()
    rig.create()
    assert rig.holding_quota() == []
    world.tpu.tick(to="FAILED", code=8, message="There is no more capacity in the zone")
    (holding,) = rig.holding_quota()
    assert holding.error is not None
    assert holding.error.message == "There is no more capacity in the zone"
    with pytest.raises(RigError, match="FAILED and holds quota; `torchtpu-rig delete` frees it"):
        rig.create()
    assert rig.delete()
    assert rig.create() is not None


def test_a_preempted_vm_is_told_from_one_that_serves(world: World) -> None:
    rig = world.rig()
    rig.create()
    world.tpu.tick(to="ACTIVE")
    assert rig.status().node is not None
    world.tpu.tick(to="SUSPENDED")
    status = rig.status()
    assert (status.phase, status.node) == ("ended", None)
    assert status.resource is not None
    assert status.resource.initiator == "SERVICE"


def test_the_gcloud_command_says_the_same_as_the_request() -> None:
    text = gcloud(Settings(project_id="p", service_account="rig@p.iam.gserviceaccount.com"))
    assert text.startswith("gcloud alpha compute tpus queued-resources create gemma4-rust-qr ")
    body = plan(OURS, {}).body
    assert f"--max-run-duration={body['runDuration']['maxRunDuration']}" in text
    assert f"--valid-until-duration={body['queueingPolicy']['validUntilDuration']}" in text
    assert "--provisioning-model=flex-start" in text
    assert "--spot" not in gcloud(Settings(project_id="p", provisioning_model="spot"))
