"""A price is today's where the catalog can be had, and says where it is from where it cannot."""

from __future__ import annotations

from datetime import date
from typing import TYPE_CHECKING, Any

import pytest

from rig import cost
from rig.cost import CostError
from rig.google import Google
from rig.prices import current
from rig.settings import Settings
from tests.rig.fake_project import catalog, sku
from tests.rig.fake_tpu import FakeTpu, RefusedError, rest_door, services

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from rig.cost import Cost


class Tokens:
    """One for everything."""

    def token(self, *, fresh: bool = False) -> str:
        return "token"


class World:
    """The catalog, and whoever asks it on a certain day."""

    def __init__(self, tpu: FakeTpu, google: Google) -> None:
        self.tpu, self.google, self.day = tpu, google, date(2026, 12, 1)

    def price(self, **changed: Any) -> Cost:
        settings = Settings(project_id="my-project", **changed)
        return current(self.google, settings, now=lambda: self.day)


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    tpu = FakeTpu()
    with rest_door(tpu) as door, Google(Tokens(), sleep=lambda _: None) as google:
        for key, value in services(door).items():
            monkeypatch.setenv(key, value)
        yield World(tpu, google)


@pytest.mark.parametrize(
    ("zone", "model", "usd"),
    [
        ("us-west4-a", "flex-start", 0.60),
        ("us-west4-a", "spot", 0.607),
        ("us-west4-a", "on-demand", 1.20),
        ("us-west4-a", "reserved", 1.20),
        ("europe-west4-b", "spot", 0.78),
        ("europe-west4-b", "on-demand", 1.56),
    ],
)
def test_every_model_has_its_own_entry_in_its_region(
    world: World, zone: str, model: str, usd: float
) -> None:
    found = world.price(zone=zone, provisioning_model=model)
    assert found.usd_per_hour == pytest.approx(usd)
    assert (found.source, found.priced) == ("Cloud Billing Catalog", world.day)


def test_several_chips_cost_as_many_times_as_much_and_the_text_says_where_it_is_from(
    world: World,
) -> None:
    found = world.price(accelerator_type="v5litepod-4")
    assert found.usd_per_hour == pytest.approx(2.40)
    assert str(found) == ("at most USD 9.60: 4 h at USD 2.40 (Cloud Billing Catalog of 2026-12)")


def test_a_price_that_changed_counts_against_the_cap(world: World) -> None:
    world.tpu.project.skus = [
        sku("DWS Defined Duration V5e running in Las Vegas", ("us-west4",), 2)
    ]
    settings = Settings(project_id="my-project")
    assert cost.check(settings)
    with pytest.raises(CostError, match=r"found at most USD 8.00"):
        cost.check(settings, found=world.price())


def test_the_catalog_is_read_to_its_last_page_once_a_day(world: World) -> None:
    pages = -(-len(world.tpu.project.skus) // world.tpu.project.page_size)
    assert pages > 1
    world.price(zone="europe-west4-b", provisioning_model="spot")
    world.price()
    assert len(world.tpu.calls) == pages
    world.day = date(2026, 12, 2)
    world.price()
    assert len(world.tpu.calls) == 2 * pages


def test_what_was_kept_in_another_form_is_asked_again(world: World, tmp_path: Path) -> None:
    (tmp_path / "torchtpu-rig").mkdir()
    (tmp_path / "torchtpu-rig" / "prices.json").write_text('{"day": "2026-12-01"}')
    assert world.price().source == "Cloud Billing Catalog"


def test_the_newest_price_counts_and_one_by_another_unit_does_not(world: World) -> None:
    entry = catalog()[1]
    newer = sku("", (), 0.66)["pricingInfo"]
    world.tpu.project.skus = [
        {**entry, "pricingInfo": entry["pricingInfo"] + newer},
        sku("TpuV5e running in Las Vegas", ("us-west4",), 7, unit="mo"),
        {**sku("TpuV5e running in Netherlands", ("europe-west4",), 1), "pricingInfo": []},
    ]
    assert world.price().usd_per_hour == pytest.approx(0.66)
    assert "has none for this" in world.price(provisioning_model="on-demand").note
    with pytest.raises(CostError):
        world.price(zone="europe-west4-b", provisioning_model="on-demand")


def test_a_catalog_that_refuses_leaves_the_dated_table_which_says_so(world: World) -> None:
    world.tpu.project.enabled.remove("cloudbilling.googleapis.com")
    found = world.price()
    assert (found.usd_per_hour, found.priced) == (0.60, cost.PRICES_OF)
    assert (
        "(list price of 2026-11; the Cloud Billing Catalog could not be asked: PERMISSION_DENIED: "
        in str(found)
    )
    # Only what was found is kept.
    world.tpu.project.enabled.add("cloudbilling.googleapis.com")
    assert world.price().source == "Cloud Billing Catalog"


def test_a_catalog_that_does_not_answer_leaves_the_dated_table(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CLOUDBILLING_API_ENDPOINT", "http://127.0.0.1:9")
    assert "an answer from 127.0.0.1" in world.price().note
    with pytest.raises(CostError, match="none for v5litepod-1 spot in europe-west4"):
        world.price(zone="europe-west4-b", provisioning_model="spot")


def test_a_moment_of_trouble_does_not_lose_the_catalog(world: World) -> None:
    world.tpu.next_answers = [None, RefusedError(503, "UNAVAILABLE", "try again")]
    assert world.price().source == "Cloud Billing Catalog"
