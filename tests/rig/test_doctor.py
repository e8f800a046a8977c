"""Everything that would make creating fail is found before, each with what to do, and nothing is changed by looking."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import pytest

from rig import capacity, doctor
from rig.bundle import bundle
from rig.network import Firewall
from rig.plan import plan
from rig.session import opened
from rig.settings import Settings
from tests.rig.fake_tpu import FakeTpu, RefusedError, rest_door, services

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from rig.doctor import Finding

# The sources do not change while the tests run.
packed = functools.cache(bundle)
NAMES = {name for name, _, _ in doctor.LOOKS}


@pytest.fixture
def tpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeTpu]:
    fake = FakeTpu()
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    monkeypatch.setenv("GOOGLE_OAUTH_ACCESS_TOKEN", "token")
    monkeypatch.setattr("rig.google.FIRST_PAUSE", 0)
    monkeypatch.setattr("rig.doctor.bundle", packed)
    with rest_door(fake) as door:
        for key, value in services(door).items():
            monkeypatch.setenv(key, value)
        yield fake


def found(**changed: Any) -> dict[str, list[Finding]]:
    """Findings by name."""
    changed.setdefault("project_id", "my-project")
    by_name: dict[str, list[Finding]] = {}
    with opened(Settings(**changed)) as session:
        for one in doctor.examine(session):
            by_name.setdefault(one.name, []).append(one)
    return by_name


def bad(by_name: dict[str, list[Finding]]) -> set[str]:
    return {name for name, several in by_name.items() if not all(one.ok for one in several)}


def only(name: str, by_name: dict[str, list[Finding]]) -> Finding:
    (one,) = by_name[name]
    return one


def test_a_project_that_is_ready_has_nothing_to_do_and_is_left_as_it_was(tpu: FakeTpu) -> None:
    by_name = found()
    assert bad(by_name) == set()
    assert only("account", by_name).text == "the token in GOOGLE_OAUTH_ACCESS_TOKEN"
    assert only("project", by_name).text == "my-project is ACTIVE"
    assert only("chip", by_name).text == "us-west4-a has v5litepod-1 for flex-start"
    assert only("image", by_name).text == "v2-alpha-tpuv5-lite"
    assert only("way in", by_name).text == (
        "tcp:8000 from 203.0.113.7/32 to tpu-rust, which will be made"
    )
    assert "TPUV5sPreemptibleLitepod" in only("quota", by_name).text
    assert only("price", by_name).text.startswith("at most USD 2.40: 4 h at USD 0.60")
    assert "of 500 KiB; the largest value, bundle-server" in only("metadata", by_name).text
    assert only("end", by_name).text == "the service ends the VM after 4 h"
    questions = {"GET", "POST"}
    assert {call.method for call in tpu.calls} == questions
    assert all(
        call.path.endswith(":testIamPermissions") for call in tpu.calls if call.method == "POST"
    )
    assert (tpu.resources, tpu.project.firewalls) == ({}, {})


def test_apis_that_are_off_are_named_with_the_command_that_enables_them(tpu: FakeTpu) -> None:
    tpu.project.enabled -= {"tpu.googleapis.com", "secretmanager.googleapis.com"}
    by_name = found(hf_token_secret="hf")
    api = only("API tpu.googleapis.com", by_name)
    assert not api.ok
    assert api.do == (
        "Run `gcloud services enable tpu.googleapis.com --project=my-project` and wait a minute."
    )
    assert not only("API secretmanager.googleapis.com", by_name).ok
    assert only("API compute.googleapis.com", by_name).ok
    # What asks them says the same, and the others are looked at all the same.
    assert bad(by_name) >= {"chip", "image", "quota", "secret"}
    assert only("chip", by_name).do == api.do
    assert only("network", by_name).ok
    assert "API secretmanager.googleapis.com" not in found()


def test_each_right_that_lacks_is_named_with_the_role_that_has_it(tpu: FakeTpu) -> None:
    tpu.project.permissions = {
        *("tpu.nodes.get", "tpu.nodes.list", "tpu.nodes.delete", "tpu.operations.get"),
        *("tpu.acceleratortypes.list", "tpu.runtimeversions.list"),
        *doctor.PERMISSIONS["roles/compute.securityAdmin"],
    }
    admin, user = found()["permissions"]
    assert "lacks tpu.nodes.create" in admin.text
    assert "tpu.nodes.get" not in admin.text
    assert admin.do == "Ask an owner of my-project for roles/tpu.admin."
    assert "iam.serviceAccounts.actAs" in user.text
    assert user.do is not None
    assert "roles/iam.serviceAccountUser" in user.do
    tpu.project.permissions = set()
    assert len(found(api_key_secret="rig-key")["permissions"]) == 4


def test_a_project_that_is_not_there_or_going_is_told(tpu: FakeTpu) -> None:
    tpu.project.lifecycle = "DELETE_REQUESTED"
    assert only("project", found()).do == "Restore the project, or use another."
    tpu.project.is_there = False
    project = only("project", found())
    assert "does not exist, or the token in" in project.text
    assert project.do == "Set PROJECT_ID to the project's id, not its name."


def test_without_a_project_only_what_needs_none_is_looked_at(tpu: FakeTpu) -> None:
    by_name = found(project_id=None)
    assert by_name["project"][0].do == "Set PROJECT_ID in tpu.env, or give --project."
    assert only("chip", by_name).text == "not looked at: no project is set"
    assert all(only(name, by_name).ok for name in ("price", "metadata", "end", "gcloud"))
    assert {call.path for call in tpu.calls} == {"/v1/services/6F81-5844-456A/skus"}


def test_a_zone_without_the_chip_or_without_this_way_to_have_it_is_told_with_another(
    tpu: FakeTpu,
) -> None:
    chip = only("chip", found(zone="us-central2-b"))
    assert (chip.ok, chip.text) == (False, "us-central2-b has no v5litepod-1; it has v4-8")
    assert chip.do == "`torchtpu-rig capacity` lists zones that have it."
    chip = only("chip", found(zone="europe-west4-b"))
    assert not chip.ok
    assert chip.do == "Use ZONE=us-west4-a, or PROVISIONING_MODEL=spot here."
    assert only("chip", found(zone="europe-west4-b", provisioning_model="spot")).ok
    capacity.remember(Settings(project_id="my-project"), "no chips")
    assert only("chip", found()).text.endswith("UTC: no chips")


def test_an_image_that_is_not_there_or_not_for_the_chip_is_told(tpu: FakeTpu) -> None:
    image = only("image", found(runtime_version="tpu-ubuntu2204-base"))
    assert "has no tpu-ubuntu2204-base; it has tpu-vm-base, v2-alpha-tpuv5," in image.text
    image = only("image", found(runtime_version="tpu-vm-base"))
    assert (image.ok, image.do) == (False, "Set RUNTIME_VERSION=v2-alpha-tpuv5-lite.")


def test_a_network_that_is_not_there_is_told(tpu: FakeTpu) -> None:
    network = only("network", found(network="missing"))
    assert network.text == "there is no projects/my-project/global/networks/missing"


def test_the_way_in_is_told_as_it_is_and_as_it_will_be(tpu: FakeTpu) -> None:
    with opened(Settings(project_id="my-project")) as session:
        Firewall(session.google, session.settings, sleep=lambda _: None).open()
    assert only("way in", found()).text.endswith("to tpu-rust, as it is")
    assert only("way in", found(network_tags="other")).text.endswith("which will be corrected")
    assert only("way in", found(access="iap")).text.startswith("tcp:22 from 35.235.240.0/20")
    tpu.project.firewalls["projects/my-project/global/firewalls/gemma4-rust-8000"][
        "description"
    ] = ""
    way_in = only("way in", found())
    assert not way_in.ok
    assert "somebody else's" in way_in.text


def test_a_port_that_is_open_to_everybody_is_warned_of(tpu: FakeTpu) -> None:
    way_in = only("way in", found(source_range="0.0.0.0/0"))
    assert "the whole internet, in plain HTTP" in way_in.text
    assert way_in.do is not None
    assert "ACCESS=iap" in way_in.do


def test_without_an_address_service_it_says_what_to_set(
    tpu: FakeTpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("IPIFY_API_ENDPOINT", "http://127.0.0.1:9")
    way_in = only("way in", found())
    assert way_in.do == "set SOURCE_RANGE to the range that may reach the VM (203.0.113.7/32)"


def test_what_holds_quota_for_nothing_is_listed_with_the_command_that_frees_it(
    tpu: FakeTpu,
) -> None:
    for zone, name in (("us-west4-a", "one"), ("us-east1-c", "two")):
        wanted = plan(
            Settings(
                project_id="my-project", zone=zone, queued_resource=name, provisioning_model="spot"
            ),
            {},
        )
        tpu.create(wanted.parent, {"queuedResourceId": name}, wanted.body)
    tpu.tick(to="FAILED")
    holding = found()["quota"]
    assert [one.do for one in holding] == [
        "Run `torchtpu-rig delete --zone us-west4-a --name one`.",
        "Run `torchtpu-rig delete --zone us-east1-c --name two`.",
    ]
    assert bad({"quota": holding}) == {"quota"}


def test_what_costs_too_much_or_has_no_price_is_told(tpu: FakeTpu) -> None:
    price = only("price", found(max_run_duration="1d"))
    assert "expected a run of at most USD 5.00 (MAX_COST_USD)" in price.text
    assert price.do == "shorten MAX_RUN_DURATION or raise MAX_COST_USD"
    assert not only("price", found(zone="us-east1-c", provisioning_model="spot")).ok


def test_secrets_are_looked_for_and_never_read(tpu: FakeTpu) -> None:
    tpu.project.secrets["projects/my-project/secrets/rig-key"] = ["s3cr3t"]
    key, token = found(api_key_secret="rig-key", hf_token_secret="hf")["secret"]
    assert key.ok
    assert (
        "rig-key for the API key is there; the VM's account needs roles/secretmanager" in key.text
    )
    assert not token.ok
    assert token.do is not None
    assert "gcloud secrets create hf --data-file=-" in token.do
    assert "will be made with a new key" in only("secret", found(api_key_secret="new")).text
    assert not any(call.path.endswith(":access") for call in tpu.calls)


def test_a_vm_that_ends_itself_needs_a_role_for_it(tpu: FakeTpu) -> None:
    end = only(
        "end", found(idle_minutes=30, service_account="rig@my-project.iam.gserviceaccount.com")
    )
    assert end.text == (
        "the VM deletes itself after 30 min without a request; "
        "for that rig@my-project.iam.gserviceaccount.com needs roles/tpu.admin"
    )
    end = only("end", found(provisioning_model="spot", max_run_duration="2h"))
    assert end.text.startswith("the VM deletes itself after 2 h; for that the project's default")
    assert end.do is not None
    assert "--role=roles/tpu.admin" in end.do


def test_a_service_that_does_not_answer_is_one_finding_and_hides_no_other(
    tpu: FakeTpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TPU_API_ENDPOINT", "http://127.0.0.1:9")
    by_name = found()
    assert "expected an answer from 127.0.0.1" in only("chip", by_name).text
    assert only("image", by_name).text == "not looked at: tpu.googleapis.com does not answer"
    assert bad(by_name) == {"chip", "image", "quota"}
    assert {*by_name} >= NAMES - {"APIs", "secret"}


def test_a_refusal_of_one_look_hides_no_other(tpu: FakeTpu) -> None:
    denied = RefusedError(403, "PERMISSION_DENIED", "The caller does not have permission")
    tpu.next_answers = [None, denied]
    by_name = found()
    assert bad(by_name) == {"APIs"}
    assert only("APIs", by_name).do == (
        "Ask an owner of my-project for roles/viewer: creating may work without, looking does not."
    )


def test_a_token_that_has_ended_is_told_once(tpu: FakeTpu) -> None:
    tpu.good_tokens = set()
    by_name = found()
    assert by_name["project"][0].do is not None
    assert "gcloud auth application-default login" in by_name["project"][0].do
    assert only("chip", by_name).text == "not looked at: nobody is signed in"


def test_without_gcloud_only_what_needs_it_complains(
    tpu: FakeTpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    assert only("gcloud", found()).ok
    assert not only("gcloud", found(access="iap")).ok


def test_sources_that_are_too_large_or_hold_a_secret_are_told(
    tpu: FakeTpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rig.bundle.MAX_VALUE", 1000)
    size = only("metadata", found())
    assert not size.ok
    assert "of at most 1000 bytes" in size.text
