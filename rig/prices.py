"""What a chip-hour of v5e costs today: the Cloud Billing Catalog, or where it cannot be had the dated table of rig/cost.py.

The catalog of Compute Engine is tens of thousands of entries long, so what was found in it is kept for a day.
"""

from __future__ import annotations

import json
from datetime import UTC, date, datetime
from typing import TYPE_CHECKING, Any

from rig import cost
from rig.google import GoogleError, UnreachableError
from rig.records import home

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping
    from pathlib import Path

    from rig.cost import Cost
    from rig.google import Google
    from rig.settings import Provisioning, Settings

SKUS = "v1/services/6F81-5844-456A/skus"
"""Compute Engine's, where TPUs are."""
CATALOG = "Cloud Billing Catalog"

# Starts of an entry's description with its usage type. What a reservation's chip costs is the same, used or not.
_KINDS: tuple[tuple[str, str, tuple[Provisioning, ...]], ...] = (
    ("DWS Defined Duration V5e running in", "", ("flex-start",)),
    ("TpuV5e attached to Spot Preemptible VMs", "Preemptible", ("spot",)),
    ("TpuV5e running in", "OnDemand", ("on-demand", "reserved")),
)

Prices = dict[tuple[str, "Provisioning"], float]
"""USD for a chip-hour of v5e by region and provisioning model."""


def today() -> date:
    """The day, in UTC."""
    return datetime.now(UTC).date()


def current(google: Google, settings: Settings, *, now: Callable[[], date] = today) -> Cost:
    """What the settings' VM costs; its text says whether that is from today's catalog, or why it is not.

    Raises:
        CostError: neither the catalog nor the table has a price for it.
    """
    try:
        found = catalog(google, now=now)
    except (GoogleError, UnreachableError) as error:
        note = f"the {CATALOG} could not be asked: {str(error)[:80]}"
        return cost.cost(settings, note=note)
    try:
        return cost.cost(settings, found, now(), CATALOG)
    except cost.CostError:
        return cost.cost(settings, note=f"the {CATALOG} has none for this")


def catalog(google: Google, *, now: Callable[[], date] = today) -> Prices:
    """Every price of v5e in the catalog, from today's copy on this machine if there is one.

    Raises:
        GoogleError, UnreachableError: the service refuses, or does not answer.
    """
    file = home() / "prices.json"
    known = _kept(file, now())
    if known is not None:
        return known
    found = dict(_prices(google.pages("cloudbilling", SKUS, "skus")))
    _keep(file, now(), found)
    return found


def _prices(
    skus: Iterable[Mapping[str, Any]],
) -> Iterator[tuple[tuple[str, Provisioning], float]]:
    for sku in skus:
        for start, usage_type, models in _KINDS:
            if not sku.get("description", "").startswith(start):
                continue
            if usage_type and sku.get("category", {}).get("usageType") != usage_type:
                continue
            price = _usd_per_hour(sku)
            if price is not None:
                for region in sku.get("serviceRegions", []):
                    yield from (((region, model), price) for model in models)


def _usd_per_hour(sku: Mapping[str, Any]) -> float | None:
    """The first tier with a price of the newest price; None when it is by another unit or in another currency."""
    if not sku.get("pricingInfo"):
        return None
    expression = sku["pricingInfo"][-1].get("pricingExpression", {})
    if expression.get("usageUnit") != "h":
        return None
    for tier in expression.get("tieredRates", []):
        money = tier.get("unitPrice", {})
        price = int(money.get("units") or 0) + int(money.get("nanos") or 0) / 1e9
        if price > 0 and money.get("currencyCode", "USD") == "USD":
            return float(price)
    return None


def _kept(file: Path, day: date) -> Prices | None:
    try:
        content = json.loads(file.read_text())
        if content["day"] != day.isoformat():
            return None
        return {(region, model): float(price) for region, model, price in content["prices"]}
    except (OSError, ValueError, KeyError, TypeError):
        # Never asked, or a file that another version wrote.
        return None


def _keep(file: Path, day: date, found: Prices) -> None:
    rows = [[region, model, price] for (region, model), price in sorted(found.items())]
    file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    # Renamed, so that a reader never sees half of it.
    new = file.with_suffix(".new")
    new.write_text(json.dumps({"day": day.isoformat(), "prices": rows}))
    new.replace(file)
