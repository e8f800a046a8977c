"""Where a chip may be had is found without asking for one, and what asking brought is remembered."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import pytest

from rig import capacity
from rig.google import GoogleError, UnreachableError
from rig.session import opened
from rig.settings import Settings, SettingsError
from tests.rig.fake_project import sku
from tests.rig.fake_tpu import FakeTpu, RefusedError, rest_door, services

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from rig.capacity import Offer

NOON = datetime(2026, 12, 1, 12, tzinfo=UTC)


@pytest.fixture
def tpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeTpu]:
    fake = FakeTpu()
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    monkeypatch.setenv("GOOGLE_OAUTH_ACCESS_TOKEN", "token")
    monkeypatch.setattr("rig.google.FIRST_PAUSE", 0)
    with rest_door(fake) as door:
        for key, value in services(door).items():
            monkeypatch.setenv(key, value)
        yield fake


def offers(**changed: Any) -> list[Offer]:
    with opened(Settings(project_id="my-project", **changed)) as session:
        return capacity.find(session)


def at(zone: str, model: str, found: list[Offer]) -> Offer:
    (one,) = [one for one in found if (one.zone, one.provisioning_model) == (zone, model)]
    return one


def test_every_zone_with_the_chip_is_offered_in_every_way_it_takes(tpu: FakeTpu) -> None:
    found = offers()
    assert {one.zone for one in found} == {"us-west4-a", "us-east1-c", "europe-west4-b"}
    assert {
        one.zone for one in found if one.provisioning_model == "flex-start" and one.has_type
    } == {"us-west4-a"}
    assert all(one.has_type for one in found if one.provisioning_model != "flex-start")
    assert tpu.resources == {}
    assert {call.method for call in tpu.calls} == {"GET"}


def test_the_cheapest_comes_first_and_what_is_not_offered_last(tpu: FakeTpu) -> None:
    found = offers()
    assert (found[0].zone, found[0].provisioning_model) == ("us-west4-a", "flex-start")
    assert found[0].usd_per_hour == pytest.approx(0.60)
    assert at("europe-west4-b", "spot", found).usd_per_hour == pytest.approx(0.78)
    assert at("us-east1-c", "spot", found).usd_per_hour is None
    assert [one.has_type for one in found] == sorted((one.has_type for one in found), reverse=True)


def test_a_bigger_slice_costs_as_much_more(tpu: FakeTpu) -> None:
    found = offers(accelerator_type="v5litepod-8")
    assert {one.zone for one in found} == {"us-west4-a"}
    assert at("us-west4-a", "on-demand", found).usd_per_hour == pytest.approx(9.60)


def test_the_settings_zone_is_shown_where_it_has_no_such_chip(tpu: FakeTpu) -> None:
    found = offers(zone="us-central2-b")
    assert not any(one.has_type for one in found if one.zone == "us-central2-b")
    assert any(one.has_type for one in found)


def test_another_kind_of_chip_has_no_price_and_no_known_limits(tpu: FakeTpu) -> None:
    tpu.zones["us-east5-a"] = {"v6e-1"}
    found = offers(accelerator_type="v6e-1", zone="us-east5-a")
    assert [(one.has_type, one.usd_per_hour) for one in found] == [(True, None)] * 4


def test_what_was_refused_is_remembered_for_its_zone_way_and_project(tpu: FakeTpu) -> None:
    settings = Settings(project_id="my-project", provisioning_model="spot")
    capacity.remember(settings, "There is no more capacity", now=lambda: NOON)
    found = offers()
    told = "2026-12-01 12:00 UTC: There is no more capacity"
    assert at("us-west4-a", "spot", found).last_refusal == told
    assert [one.last_refusal for one in found].count(None) == len(found) - 1
    capacity.remember(settings, "quota", now=lambda: NOON)
    assert at("us-west4-a", "spot", offers()).last_refusal == "2026-12-01 12:00 UTC: quota"
    capacity.remember(settings.model_copy(update={"project_id": "other"}), "no", now=lambda: NOON)
    assert at("us-west4-a", "spot", offers()).last_refusal == "2026-12-01 12:00 UTC: quota"


def test_a_memory_that_cannot_be_read_is_begun_anew(tpu: FakeTpu, tmp_path: Path) -> None:
    (tmp_path / "torchtpu-rig").mkdir()
    (tmp_path / "torchtpu-rig" / "refusals.json").write_text("[")
    assert {one.last_refusal for one in offers()} == {None}
    capacity.remember(Settings(project_id="my-project"), "no", now=lambda: NOON)
    assert at("us-west4-a", "flex-start", offers()).last_refusal == "2026-12-01 12:00 UTC: no"


def test_a_zone_that_is_closed_to_this_account_hides_no_other(tpu: FakeTpu) -> None:
    tpu.project.skus = [sku("DWS Defined Duration V5e running in Las Vegas", ("us-west4",), 0.6)]
    offers()
    locations = tpu.types
    closed = RefusedError(
        403, "PERMISSION_DENIED", "Location us-east1-c is not found or access is unauthorized."
    )

    def types(zone: str) -> list[dict[str, Any]]:
        if zone.endswith("us-east1-c"):
            raise closed
        return locations(zone)

    tpu.types = types  # type: ignore[method-assign]
    assert {one.zone for one in offers()} == {"us-west4-a", "europe-west4-b"}


def test_a_refusal_that_is_no_answer_is_told(tpu: FakeTpu, monkeypatch: pytest.MonkeyPatch) -> None:
    tpu.project.enabled.remove("tpu.googleapis.com")
    with pytest.raises(GoogleError, match="Cloud TPU API has not been used"):
        offers()
    monkeypatch.setenv("TPU_API_ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(UnreachableError):
        offers()
    with opened(Settings()) as session, pytest.raises(SettingsError, match="PROJECT_ID"):
        capacity.find(session)


def test_without_the_catalog_prices_are_of_the_dated_table(tpu: FakeTpu) -> None:
    tpu.project.enabled.remove("cloudbilling.googleapis.com")
    found = offers()
    assert at("us-west4-a", "spot", found).usd_per_hour == pytest.approx(0.607)
    assert at("europe-west4-b", "spot", found).usd_per_hour is None
