"""Where a chip of the wanted type may be had: zones, ways to have it, prices, and what was refused there last. Creates nothing.

The service does not say what is free; only asking for a chip does. So this machine remembers what asking brought.
"""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING, get_args

from rig import cost, prices
from rig.google import GoogleError, UnreachableError
from rig.records import home
from rig.settings import Provisioning

if TYPE_CHECKING:
    from collections.abc import Callable

    from rig.prices import Prices
    from rig.session import Session
    from rig.settings import Settings

MODELS: tuple[Provisioning, ...] = get_args(Provisioning)
# Flex-start takes v5e here and nowhere else (reported 2026-08-04): other zones that have the type refuse this way to have it.
FLEX_START_V5E = {"us-west4-a"}
AT_ONCE = 8


@dataclass(frozen=True)
class Offer:
    """One way to have the settings' chip in one zone."""

    zone: str
    provisioning_model: Provisioning
    has_type: bool
    """It can be asked for there and so; not that one is free."""
    usd_per_hour: float | None
    """Of the whole VM; None when no price is known."""
    last_refusal: str | None
    """What asking brought last time, and when."""


def find(session: Session) -> list[Offer]:
    """What there is, the cheapest first and what is not offered last.

    Raises:
        SettingsError: no project is set.
        GoogleError, UnreachableError: the service refuses, or does not answer.
    """
    settings = session.settings
    has = {zone for zone, types in _types(session).items() if settings.accelerator_type in types}
    known, refused = _known_prices(session), _refusals()
    offers = []
    for zone in sorted(has | {settings.zone}):
        for model in MODELS:
            usd = known.get((cost.region(zone), model))
            there = settings.model_copy(update={"zone": zone, "provisioning_model": model})
            offers.append(
                Offer(
                    zone=zone,
                    provisioning_model=model,
                    has_type=zone in has and is_taken(model, settings.accelerator_type, zone),
                    usd_per_hour=usd * cost.chips(settings.accelerator_type) if usd else None,
                    last_refusal=refused.get(_key(there)),
                )
            )
    return sorted(offers, key=lambda one: (not one.has_type, one.usd_per_hour or float("inf")))


def remember(
    settings: Settings, text: str, *, now: Callable[[], datetime] = lambda: datetime.now(UTC)
) -> None:
    """Keep what the service said when the settings' chip was asked for."""
    found = _refusals()
    found[_key(settings)] = f"{now():%Y-%m-%d %H:%M} UTC: {text}"
    file = home() / "refusals.json"
    file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    new = file.with_suffix(".new")
    new.write_text(json.dumps(found, indent=1))
    new.replace(file)


def _types(session: Session) -> dict[str, set[str]]:
    """Accelerator types by zone, as far as this account may see zones."""
    # Reads the project, so that a missing one is told as such.
    project = session.settings.parent.rsplit("/", 2)[0]
    found = session.google.pages("tpu", f"v2alpha1/{project}/locations", "locations")
    zones = [str(one["locationId"]) for one in found]

    def of(zone: str) -> set[str]:
        try:
            return session.api.accelerator_types(f"{project}/locations/{zone}")
        except GoogleError as error:
            if error.is_not_found or error.code == 403:
                # Listed for everybody, open to some.
                return set()
            raise

    with ThreadPoolExecutor(AT_ONCE) as several:
        return dict(zip(zones, several.map(of, zones), strict=True))


def last_refusal(settings: Settings) -> str | None:
    """What asking for the settings' chip brought last time, and when."""
    return _refusals().get(_key(settings))


def is_taken(model: Provisioning, accelerator_type: str, zone: str) -> bool:
    """A zone that has the type takes this way to have it, as far as is known."""
    is_v5e = accelerator_type.startswith("v5litepod-")
    return model != "flex-start" or not is_v5e or zone in FLEX_START_V5E


def _known_prices(session: Session) -> Prices:
    if not session.settings.accelerator_type.startswith("v5litepod-"):
        return {}
    try:
        return cost.PRICES | prices.catalog(session.google)
    except (GoogleError, UnreachableError):
        # The dated table is better than nothing to compare by; creating says where its price is from.
        return cost.PRICES


def _key(settings: Settings) -> str:
    words = (settings.project_id, settings.zone, settings.provisioning_model)
    return " ".join([*map(str, words), settings.accelerator_type])


def _refusals() -> dict[str, str]:
    try:
        found = json.loads((home() / "refusals.json").read_text())
    except (OSError, ValueError):
        # None yet, or a file that something else wrote.
        return {}
    return {str(key): str(text) for key, text in found.items()} if isinstance(found, dict) else {}
