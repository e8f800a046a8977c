"""What a run costs at most, by list price. A price that is not known stops nothing from being asked, but something from being created."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import date
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping
    from datetime import timedelta

    from rig.settings import Provisioning, Settings

PRICES_OF = date(2026, 11, 1)
# USD for a chip-hour of v5e by region: Cloud Billing Catalog, services/6F81-5844-456A, SKUs "DWS Defined Duration V5e",
# "TpuV5e attached to Spot Preemptible VMs" and "TpuV5e". A reservation is paid for whether it is used or not.
PRICES: dict[tuple[str, Provisioning], float] = {
    ("us-west4", "flex-start"): 0.60,
    ("us-west4", "spot"): 0.607,
    ("us-west4", "on-demand"): 1.20,
    ("us-west4", "reserved"): 1.20,
}


class CostError(ValueError):
    """The run could cost more than is allowed, or nobody knows what it costs."""


@dataclass(frozen=True)
class Cost:
    """Of one VM."""

    usd_per_hour: float
    longest: timedelta
    priced: date
    source: str = "list price"
    """Where the price is from."""
    note: str = ""
    """Why it is not from a better source."""

    @property
    def at_most(self) -> float:
        """USD for the longest run."""
        return self.usd_per_hour * self.longest.total_seconds() / 3600

    def __str__(self) -> str:
        hours = self.longest.total_seconds() / 3600
        return (
            f"at most USD {self.at_most:.2f}: {hours:g} h at USD {self.usd_per_hour:.2f} "
            f"({self.source} of {self.priced:%Y-%m}{f'; {self.note}' if self.note else ''})"
        )


def chips(accelerator_type: str) -> int:
    """Chips of `v5litepod-4`: 4."""
    return int(accelerator_type.rsplit("-", 1)[1])


def region(zone: str) -> str:
    """Where a zone is: us-west4-a is in us-west4, and prices are a region's."""
    return zone.rsplit("-", 1)[0]


def cost(
    settings: Settings,
    prices: Mapping[tuple[str, Provisioning], float] = PRICES,
    priced: date = PRICES_OF,
    source: str = "list price",
    note: str = "",
) -> Cost:
    """What the settings' VM costs by `prices`.

    Raises:
        CostError: they have none for its region and provisioning model.
    """
    place = region(settings.zone)
    price = prices.get((place, settings.provisioning_model))
    if price is None or not settings.accelerator_type.startswith("v5litepod-"):
        known = ", ".join(sorted({place for place, _ in prices}))
        raise CostError(
            f"expected a known price, found none for {settings.accelerator_type} {settings.provisioning_model} in {place} "
            f"(known: v5litepod in {known})"
        )
    total = price * chips(settings.accelerator_type)
    return Cost(total, settings.max_run_duration, priced, source, note)


def check(settings: Settings, replicas: int = 1, found: Cost | None = None) -> Cost:
    """The cost, if it is allowed: `found`, or by the table.

    Raises:
        CostError: `replicas` VMs could cost more than MAX_COST_USD together.
    """
    found = found or cost(settings)
    if found.at_most * replicas > settings.max_cost_usd:
        several = f"{replicas} VMs, each " if replicas > 1 else ""
        raise CostError(
            f"expected a run of at most USD {settings.max_cost_usd:.2f} (MAX_COST_USD), found {several}{found}; "
            "shorten MAX_RUN_DURATION or raise MAX_COST_USD"
        )
    return found
