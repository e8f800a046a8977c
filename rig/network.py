"""Who may reach the VM: one firewall rule of Compute Engine. Knows nothing of TPUs.

Firewall rules have no labels, so ours are known by their name and the sentence in their description; one of our name
without it is somebody else's and is left alone. Several rigs of a project with the same port and tags share a rule.
"""

from __future__ import annotations

import os
import time
import uuid
from dataclasses import dataclass
from ipaddress import AddressValueError, IPv4Address
from typing import TYPE_CHECKING, Any, Self

import httpx

from rig.errors import RigError
from rig.google import GoogleError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from rig.google import Google
    from rig.settings import Settings

OURS = "Way in to torchtpu-rig's VMs; made, corrected and deleted by it."
IAP_RANGE = "35.235.240.0/20"
"""Where Identity-Aware Proxy forwards from (cloud.google.com/iap/docs/using-tcp-forwarding)."""
EVERYBODY = "0.0.0.0/0"

ADDRESS_SERVICE = "https://api.ipify.org"
ADDRESS_SECONDS = 10.0
# A rule is often there at once, and takes half a minute at times.
FIRST_POLL_SECONDS, LONGEST_OPERATION_SECONDS = 0.2, 120.0


class NetworkError(RigError):
    """The way in cannot be made or found; the text says why and what to do."""


@dataclass(frozen=True)
class Rule:
    """An ingress rule, as far as it matters here."""

    name: str
    network: str
    """`projects/P/global/networks/N`."""
    sources: tuple[str, ...]
    tags: tuple[str, ...]
    ports: tuple[str, ...]
    """`tcp:8000`."""
    is_ours: bool = True
    is_enforced: bool = True

    @classmethod
    def of(cls, answer: Mapping[str, Any]) -> Self:
        """A `Firewall` of the Compute Engine API."""
        ports = [
            f"{allowed['IPProtocol']}:{port}"
            for allowed in answer.get("allowed", [])
            for port in allowed.get("ports", ["*"])
        ]
        return cls(
            name=answer["name"],
            network=answer["network"].partition("/compute/v1/")[2] or answer["network"],
            sources=tuple(sorted(answer.get("sourceRanges", []))),
            tags=tuple(sorted(answer.get("targetTags", []))),
            ports=tuple(sorted(ports)),
            is_ours=answer.get("description") == OURS,
            is_enforced=not answer.get("disabled", False),
        )

    @property
    def body(self) -> dict[str, Any]:
        """What is asked for to have it."""
        return {
            "name": self.name,
            "description": OURS,
            "network": self.network,
            "direction": "INGRESS",
            "sourceRanges": list(self.sources),
            "targetTags": list(self.tags),
            "allowed": [
                {"IPProtocol": protocol, "ports": [port]}
                for protocol, port in (one.split(":") for one in self.ports)
            ],
            "disabled": False,
        }


def my_address() -> IPv4Address:
    """The address that this machine has on the internet, from an address service (IPIFY_API_ENDPOINT).

    Raises:
        NetworkError: it did not answer with one.
    """
    service = (os.environ.get("IPIFY_API_ENDPOINT") or ADDRESS_SERVICE).rstrip("/")
    do = "set SOURCE_RANGE to the range that may reach the VM (203.0.113.7/32)"
    try:
        answer = httpx.get(service, params={"format": "json"}, timeout=ADDRESS_SECONDS)
        return IPv4Address(answer.raise_for_status().json()["ip"])
    except httpx.HTTPError as error:
        raise NetworkError(
            f"expected this machine's address from {service}, found {error!r}; {do}"
        ) from error
    except (AddressValueError, ValueError, KeyError, TypeError) as error:
        raise NetworkError(
            f"expected this machine's IPv4 address from {service}, found none in its answer; {do}"
        ) from error


class Firewall:
    """The settings' one rule. Every call may raise GoogleError and UnreachableError."""

    def __init__(
        self,
        google: Google,
        settings: Settings,
        *,
        sleep: Callable[[float], object] = time.sleep,
        address: Callable[[], IPv4Address] = my_address,
    ) -> None:
        self._google, self._settings = google, settings
        self._sleep, self._address = sleep, address
        network = settings.network
        if not network.startswith("projects/"):
            network = f"projects/{settings.project_id}/global/networks/{network}"
        self.network = network
        # A shared network's rules stand in the project that owns it.
        self._project = network.split("/")[1]

    @property
    def names(self) -> dict[str, str]:
        """Names of the rules for each ACCESS."""
        return {"direct": f"gemma4-rust-{self._settings.serve_port}", "iap": "gemma4-rust-iap"}

    def rule(self) -> Rule | None:
        """The rule for ACCESS as it is now, whoever made it."""
        return self._found(self.names[self._settings.access])

    def wanted(self) -> Rule:
        """The rule as the settings want it; asks for this machine's address where SOURCE_RANGE is empty.

        Raises:
            NetworkError: that address cannot be had, or no tag says which VMs it is for.
        """
        settings = self._settings
        if not settings.network_tags:
            raise NetworkError(
                "NETWORK_TAGS: expected at least one tag, found none: the port of every VM in the network would be open"
            )
        if settings.access == "iap":
            sources, port = IAP_RANGE, 22
        else:
            sources = str(settings.source_range or f"{self._address()}/32")
            port = settings.serve_port
        tags = tuple(sorted(settings.network_tags))
        name = self.names[settings.access]
        return Rule(name, self.network, (sources,), tags, (f"tcp:{port}",))

    def open(self) -> Rule:
        """Have the rule as the settings want it, and that of the other ACCESS away.

        Raises:
            NetworkError: a rule of that name is not ours, or the service could not make it.
        """
        wanted = self.wanted()
        found = self._found(wanted.name)
        if found and not found.is_ours:
            raise NetworkError(
                f"expected the firewall rule {wanted.name} to be ours (description {OURS!r}), found one that is not; "
                "it is left alone: rename it, or set another SERVE_PORT"
            )
        if found and found.network != wanted.network:
            # A rule stays in its network for good.
            self._delete(found.name)
            found = None
        if found is None:
            self._do("POST", "", wanted.body)
        elif found != wanted:
            self._do("PATCH", f"/{wanted.name}", wanted.body)
        for access, name in self.names.items():
            if access != self._settings.access:
                self._close(name)
        return wanted

    def close(self) -> bool:
        """Delete what is ours; false when there was nothing.

        Raises:
            NetworkError: the service could not.
        """
        closed = [self._close(name) for name in self.names.values()]
        return any(closed)

    def _close(self, name: str) -> bool:
        found = self._found(name)
        if found is None or not found.is_ours:
            return False
        self._delete(name)
        return True

    def _delete(self, name: str) -> None:
        try:
            self._do("DELETE", f"/{name}")
        except GoogleError as error:
            if not error.is_not_found:
                raise

    def _found(self, name: str) -> Rule | None:
        try:
            return Rule.of(self._google.call("GET", "compute", f"{self._rules}/{name}"))
        except GoogleError as error:
            if error.is_not_found and "firewalls" in error.message:
                return None
            raise

    @property
    def _rules(self) -> str:
        return f"compute/v1/projects/{self._project}/global/firewalls"

    def _do(self, method: str, path: str, body: dict[str, Any] | None = None) -> None:
        """One change, until it is done."""
        # The id makes a second try of the same change no second change.
        query = {"requestId": str(uuid.uuid4())}
        operation = self._google.call(method, "compute", f"{self._rules}{path}", query, body)
        waited, pause = 0.0, FIRST_POLL_SECONDS
        while operation.get("status") != "DONE":
            if waited >= LONGEST_OPERATION_SECONDS:
                raise NetworkError(
                    f"expected Compute Engine to be done with {operation['name']} in {LONGEST_OPERATION_SECONDS:g} s, "
                    f"found it {operation.get('status')}; try again"
                )
            self._sleep(pause)
            waited += pause
            pause = min(2 * pause, 5.0)
            at = f"compute/v1/projects/{self._project}/global/operations/{operation['name']}"
            operation = self._google.call("GET", "compute", at)
        if errors := operation.get("error", {}).get("errors"):
            told = "; ".join(str(one.get("message", one.get("code"))) for one in errors)
            raise NetworkError(f"expected the firewall rule to be changed, found: {told}")
