"""Several VMs as one: NAME-0 to NAME-(N-1), the same settings and one API key, created inside one cost cap and deleted together.

What serves them at one address is rig/front.py.
"""

from __future__ import annotations

import functools
import re
from typing import TYPE_CHECKING

from rig import cost
from rig.bundle import bundle
from rig.errors import RigError
from rig.front import serve_fleet as serve_fleet
from rig.google import GoogleError, UnreachableError
from rig.provision import Rig
from rig.records import Record
from rig.settings import NAME
from rig.states import State
from rig.surroundings import Surroundings

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from rig.bundle import Bundle
    from rig.cost import Cost
    from rig.provision import Status
    from rig.session import Session


class FleetError(RigError):
    """Some of the VMs are not as they should be; the text says which are there."""


class Fleet:
    """The settings' VM, `replicas` times."""

    def __init__(
        self,
        session: Session,
        replicas: int,
        *,
        folder: Path | None = None,
        pack: Callable[[], Bundle] = bundle,
    ) -> None:
        """Ask nobody yet; `folder` is where records are, if not where they always are.

        Raises:
            FleetError: the names would be too long.
        """
        if replicas < 1:
            raise FleetError(f"expected at least one replica, found {replicas}")
        self._session, self._replicas, self._folder = session, replicas, folder
        self._base = session.settings.queued_resource
        longest = f"{self._base}-{replicas - 1}"
        if not re.fullmatch(NAME, longest):
            raise FleetError(
                f"expected names of at most 58 small letters, digits and hyphens, found {longest}; set a shorter QUEUED_RESOURCE"
            )
        # No resource has a dot in its name, so this is nobody else's record. A VM's own goes with that VM; the key stays.
        named = session.settings.model_copy(update={"queued_resource": f"{self._base}.fleet"})
        self._record = Record(named, folder)
        self._surroundings = Surroundings(session.google, session.settings, self._record)
        self._pack = functools.cache(pack)

    def create(self, price: Cost | None = None) -> None:
        """Ask for every VM that is not there.

        Raises:
            CostError: all together could cost too much; nothing was asked for.
            FleetError: one could not be had; the text says which are there, and doing it again goes on from there.
        """
        names = self._names()
        cost.check(self._session.settings, len(names), price)
        there: list[str] = []
        for name in names[: self._replicas]:
            try:
                self._rig(name).create(price)
            except (RigError, GoogleError, UnreachableError) as error:
                raise FleetError(
                    f"{_listed(there)} of {self._replicas} are there; {name} is not: {error}"
                ) from error
            there.append(name)

    def statuses(self) -> list[tuple[str, Status]]:
        """Each VM's name and where it stands: the wanted ones, and others of the fleet's names that are there.

        Raises:
            RigError: the service refuses.
        """
        return [(name, self._rig(name).status()) for name in self._names()]

    def addresses(self) -> list[str]:
        """`http://IP:PORT` of every VM that serves.

        Raises:
            RigError: the service refuses, or no port of the VMs is open.
        """
        settings = self._session.settings
        if settings.access == "iap":
            raise FleetError(
                "expected VMs with an open port, found ACCESS=iap: open a tunnel to each (`torchtpu-rig tunnel`) "
                "and give their addresses as --worker"
            )
        return [
            f"http://{status.node.external_ip}:{settings.serve_port}"
            for _, status in self.statuses()
            if status.phase == "serving" and status.node and status.node.external_ip
        ]

    def api_key(self) -> str | None:
        """What every VM's server asks for; None when this machine knows no key.

        Raises:
            GoogleError: Secret Manager refuses.
            UnreachableError: Secret Manager does not answer.
        """
        return self._surroundings.api_key()

    def delete(self) -> list[str]:
        """Delete every VM of the fleet's names, however many were asked for; the names of those that were there.

        Raises:
            FleetError: some could not be deleted; the text names them.
        """
        deleted, left = [], []
        for name in self._names():
            try:
                if self._rig(name).delete():
                    deleted.append(name)
            except (RigError, GoogleError, UnreachableError) as error:
                left.append(f"{name} ({error})")
        if left:
            raise FleetError(f"{_listed(deleted)} are deleted; not deleted: {'; '.join(left)}")
        self._record.forget()
        others = self._rig(self._names()[0]).siblings()
        going = {f"{self._session.settings.parent}/queuedResources/{name}" for name in deleted}
        if all(one.name in going or one.state is State.DELETING for one in others):
            # The way in is shared by all rigs of a project.
            self._surroundings.clear()
        return deleted

    def _names(self) -> list[str]:
        """Wanted ones first, then any others that are there: a fleet that was larger once is still paid for."""
        number = re.compile(rf"{re.escape(self._base)}-(\d+)")
        zone = f"{self._session.settings.parent}/"
        found = [
            int(match[1])
            for one in self._session.rig.siblings()
            if one.name.startswith(zone) and (match := number.fullmatch(one.short_name))
        ]
        wanted = range(self._replicas)
        more = sorted(set(found) - set(wanted))
        return [f"{self._base}-{index}" for index in [*wanted, *more]]

    def _rig(self, name: str) -> Rig:
        settings = self._session.settings.model_copy(update={"queued_resource": name})
        return Rig(
            settings,
            self._session.api,
            Record(settings, self._folder),
            prepare=self._surroundings.prepare,
            pack=self._pack,
        )


def _listed(names: list[str]) -> str:
    return ", ".join(names) or "none"
