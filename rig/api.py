"""The TPU API v2alpha1 over REST: six small calls, each typed, each tried again where that is safe. Knows nothing of settings.

Flex-start is not in the official client library nor in v2. Creating carries a request id, so a second try creates nothing twice.
"""

from __future__ import annotations

import os
import random
import time
from typing import TYPE_CHECKING, Any, Protocol

import httpx

from rig.states import Boot, Node, Operation, QueuedResource

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from rig.plan import Plan

ENDPOINT = "https://tpu.googleapis.com"
TIMEOUT_SECONDS = 30.0
ATTEMPTS = 5
FIRST_PAUSE, LONGEST_PAUSE = 0.5, 16.0
# Refusals that a moment may change. 429 is here for rates only: a quota's says so in its text.
PASSING = {408, 429, 500, 502, 503, 504}
NAMESPACE = "rig/"


class TpuApiError(RuntimeError):
    """The service refused; `status` is Google's word for why (`RESOURCE_EXHAUSTED`), `message` its text."""

    def __init__(self, code: int, status: str, message: str) -> None:
        super().__init__(f"{status}: {message}")
        self.code, self.status, self.message = code, status, message

    @property
    def is_not_found(self) -> bool:
        """There is no such thing."""
        return self.code == 404


class UnreachableError(RuntimeError):
    """The service did not answer."""


class Tokens(Protocol):
    """Where access tokens come from."""

    def token(self, *, fresh: bool = False) -> str:
        """A token; `fresh`: not the one given last, which was refused."""


class TpuApi:
    """One account's view of the service."""

    def __init__(
        self,
        tokens: Tokens,
        *,
        endpoint: str | None = None,
        sleep: Callable[[float], object] = time.sleep,
        transport: httpx.BaseTransport | None = None,
    ) -> None:
        base = endpoint or os.environ.get("TPU_API_ENDPOINT") or ENDPOINT
        self._client = httpx.Client(
            base_url=f"{base.rstrip('/')}/v2alpha1/", timeout=TIMEOUT_SECONDS, transport=transport
        )
        self._tokens = tokens
        self._sleep = sleep

    def close(self) -> None:
        """Close the connections."""
        self._client.close()

    def create(self, plan: Plan, request_id: str) -> Operation:
        """Ask for a queued resource. The same `request_id` again asks for the same one.

        Raises:
            TpuApiError, UnreachableError: as every call here.
        """
        query = {"queuedResourceId": plan.queued_resource_id, "requestId": request_id}
        answer = self._call("POST", f"{plan.parent}/queuedResources", query, plan.body)
        return Operation.model_validate(answer)

    def get(self, name: str) -> QueuedResource:
        """A queued resource by its full name."""
        return QueuedResource.model_validate(self._call("GET", name))

    def list(self, parent: str) -> list[QueuedResource]:
        """Every queued resource of a zone, or with `locations/-` of all."""
        found = self._pages(f"{parent}/queuedResources", "queuedResources")
        return [QueuedResource.model_validate(one) for one in found]

    def delete(self, name: str) -> Operation:
        """Delete a queued resource and its nodes."""
        return Operation.model_validate(self._call("DELETE", name, {"force": "true"}))

    def node(self, name: str) -> Node:
        """A node by its full name."""
        return Node.model_validate(self._call("GET", name))

    def boot(self, node: str) -> Boot:
        """What the node's startup script has published; empty before its first word."""
        body = {"queryPath": NAMESPACE, "workerIds": []}
        try:
            answer = self._call("POST", f"{node}:getGuestAttributes", body=body)
        except TpuApiError as error:
            if error.is_not_found and "Guest Attribute" in error.message:
                return Boot()
            raise
        items = [
            item
            for worker in answer.get("guestAttributes", [])
            for item in worker.get("queryValue", {}).get("items", [])
        ]
        return Boot.model_validate({item["key"]: item["value"] for item in items})

    def operation(self, name: str) -> Operation:
        """A long-running operation."""
        return Operation.model_validate(self._call("GET", name))

    def accelerator_types(self, parent: str) -> set[str]:
        """What a zone has."""
        found = self._pages(f"{parent}/acceleratorTypes", "acceleratorTypes")
        return {str(one["type"]) for one in found}

    def _pages(self, path: str, field: str) -> Iterator[dict[str, Any]]:
        token = ""
        while True:
            answer = self._call("GET", path, {"pageToken": token} if token else None)
            yield from answer.get(field, [])
            token = answer.get("nextPageToken", "")
            if not token:
                return

    def _call(
        self,
        method: str,
        path: str,
        query: dict[str, str] | None = None,
        body: dict[str, Any] | None = None,
    ) -> dict[str, Any]:
        fresh = False
        for attempt in range(1, ATTEMPTS + 1):
            headers = {"Authorization": f"Bearer {self._tokens.token(fresh=fresh)}"}
            try:
                answer = self._client.request(
                    method, path, params=query, json=body, headers=headers
                )
            except httpx.TransportError as error:
                if attempt == ATTEMPTS:
                    raise UnreachableError(
                        f"expected an answer from {self._client.base_url.host}, found {error!r}"
                    ) from error
                self._pause(attempt, None)
                continue
            if answer.is_success:
                found: dict[str, Any] = answer.json() if answer.content else {}
                return found
            refused = _refusal(answer)
            if answer.status_code == 401 and not fresh:
                # A token that was good when the command began may have ended meanwhile.
                fresh = True
                continue
            if attempt == ATTEMPTS or not _may_pass(refused):
                raise refused
            self._pause(attempt, answer.headers.get("Retry-After"))
        raise AssertionError("the last attempt returns or raises")

    def _pause(self, attempt: int, asked: str | None) -> None:
        longest = min(LONGEST_PAUSE, FIRST_PAUSE * 2**attempt)
        # Drawn at random, so that many clients do not come back together.
        pause = random.uniform(longest / 2, longest)
        if asked and asked.isdigit():
            pause = max(pause, min(float(asked), 2 * LONGEST_PAUSE))
        self._sleep(pause)


def _refusal(answer: httpx.Response) -> TpuApiError:
    try:
        error = answer.json()["error"]
        return TpuApiError(answer.status_code, str(error["status"]), str(error["message"]))
    except (ValueError, KeyError, TypeError):
        # A proxy's page, not the service's answer.
        return TpuApiError(answer.status_code, f"HTTP {answer.status_code}", answer.text[:200])


def _may_pass(refused: TpuApiError) -> bool:
    is_quota = "uota limit" in refused.message or "no more capacity" in refused.message
    return refused.code in PASSING and not is_quota
