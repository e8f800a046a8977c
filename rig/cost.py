"""What a run costs at most, by list price. A price that is not known stops nothing from being asked, but something from being created."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import date
from typing import TYPE_CHECKING

if TYPE_CHECKING:
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

    @property
    def at_most(self) -> float:
        """USD for the longest run."""
        return self.usd_per_hour * self.longest.total_seconds() / 3600

    def __str__(self) -> str:
        hours = self.longest.total_seconds() / 3600
        return (
            f"at most USD {self.at_most:.2f}: {hours:g} h at USD {self.usd_per_hour:.2f} "
            f"(list price of {self.priced:%Y-%m})"
        )


def chips(accelerator_type: str) -> int:
    """Chips of `v5litepod-4`: 4."""
    return int(accelerator_type.rsplit("-", 1)[1])


def cost(settings: Settings) -> Cost:
    """What the settings' VM costs.

    Raises:
        CostError: no price is known for its region and provisioning model.
    """
    region = settings.zone.rsplit("-", 1)[0]
    price = PRICES.get((region, settings.provisioning_model))
    if price is None or not settings.accelerator_type.startswith("v5litepod-"):
        raise CostError(
            f"expected a known price, found none for {settings.accelerator_type} {settings.provisioning_model} in {region} "
            f"(known: v5litepod in {', '.join(sorted({place for place, _ in PRICES}))})"
        )
    return Cost(price * chips(settings.accelerator_type), settings.max_run_duration, PRICES_OF)


def check(settings: Settings, replicas: int = 1) -> Cost:
    """The cost, if it is allowed.

    Raises:
        CostError: `replicas` VMs could cost more than MAX_COST_USD together.
    """
    found = cost(settings)
    if found.at_most * replicas > settings.max_cost_usd:
        several = f"{replicas} VMs, each " if replicas > 1 else ""
        raise CostError(
            f"expected a run of at most USD {settings.max_cost_usd:.2f} (MAX_COST_USD), found {several}{found}; "
            "shorten MAX_RUN_DURATION or raise MAX_COST_USD"
        )
    return found
