"""Secret Manager v1: the newest version of a secret read, and a new one written. Values are in no error and no log."""

from __future__ import annotations

import base64
from typing import TYPE_CHECKING, Any

from rig.google import GoogleError
from rig.plan import LABELS

if TYPE_CHECKING:
    from rig.google import Google


class Secrets:
    """Of one project. Every call may raise GoogleError and UnreachableError."""

    def __init__(self, google: Google, project_id: str) -> None:
        self._google = google
        self._parent = f"v1/projects/{project_id}"

    def read(self, name: str) -> str | None:
        """The newest version's value; None when there is no such secret, or none was ever written."""
        try:
            answer = self._call("GET", f"secrets/{name}/versions/latest:access")
        except GoogleError as error:
            if error.is_not_found:
                return None
            raise
        return base64.b64decode(answer["payload"]["data"]).decode()

    def has(self, name: str) -> bool:
        """It has a value that can be read; the value is not asked for."""
        try:
            answer = self._call("GET", f"secrets/{name}/versions/latest")
        except GoogleError as error:
            if error.is_not_found:
                return False
            raise
        return bool(answer.get("state") == "ENABLED")

    def write(self, name: str, value: str) -> None:
        """Make `value` the newest version, of a new secret where there is none."""
        data = base64.b64encode(value.encode()).decode()
        version = {"payload": {"data": data}}
        try:
            try:
                self._call("POST", f"secrets/{name}:addVersion", body=version)
            except GoogleError as error:
                if not error.is_not_found:
                    raise
                self._create(name)
                self._call("POST", f"secrets/{name}:addVersion", body=version)
        except GoogleError as error:
            # The service quotes what it does not understand.
            told = error.message.replace(data, "…").replace(value, "…")
            raise GoogleError(error.code, error.status, told) from None

    def _create(self, name: str) -> None:
        secret = {"replication": {"automatic": {}}, "labels": LABELS}
        try:
            self._call("POST", "secrets", {"secretId": name}, secret)
        except GoogleError as error:
            # Made meanwhile, or by an earlier try whose answer was lost.
            if error.status != "ALREADY_EXISTS":
                raise

    def _call(
        self,
        method: str,
        path: str,
        query: dict[str, str] | None = None,
        body: dict[str, Any] | None = None,
    ) -> dict[str, Any]:
        return self._google.call(method, "secretmanager", f"{self._parent}/{path}", query, body)
