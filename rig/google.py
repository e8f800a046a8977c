"""Google's REST APIs: one way to ask, with a token, tried again where that is safe. Knows no service's words.

Each service's address can be set in the environment (`TPU_API_ENDPOINT`), which is how tests and proxies get in between.
"""

from __future__ import annotations

import os
import random
import time
from typing import TYPE_CHECKING, Any, Protocol, Self

import httpx

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from types import TracebackType

TIMEOUT_SECONDS = 30.0
ATTEMPTS = 5
FIRST_PAUSE, LONGEST_PAUSE = 0.5, 16.0
# Refusals that a moment may change. 429 is here for rates only: a quota's says so in its text.
PASSING = {408, 429, 500, 502, 503, 504}


class GoogleError(RuntimeError):
    """A service refused; `status` is Google's word for why (`RESOURCE_EXHAUSTED`), `message` its text."""

    def __init__(self, code: int, status: str, message: str) -> None:
        super().__init__(f"{status}: {message}")
        self.code, self.status, self.message = code, status, message

    @property
    def is_not_found(self) -> bool:
        """There is no such thing."""
        return self.code == 404


class UnreachableError(RuntimeError):
    """A service did not answer."""


class Tokens(Protocol):
    """Where access tokens come from."""

    def token(self, *, fresh: bool = False) -> str:
        """A token; `fresh`: not the one given last, which was refused."""


class Google:
    """One account's connections to every service."""

    def __init__(
        self,
        tokens: Tokens,
        *,
        sleep: Callable[[float], object] = time.sleep,
        transport: httpx.BaseTransport | None = None,
    ) -> None:
        self._client = httpx.Client(timeout=TIMEOUT_SECONDS, transport=transport)
        self._tokens = tokens
        self._sleep = sleep
        self.who: str = getattr(tokens, "who", "the given token")
        # A user's calls are counted for a project that the sign-in names; without it some services refuse them.
        project = getattr(tokens, "quota_project", None)
        self._counted = {"X-Goog-User-Project": project} if project else {}

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the connections."""
        self._client.close()

    def pages(self, service: str, path: str, field: str) -> Iterator[dict[str, Any]]:
        """Every entry of a list that comes in pages.

        Raises:
            GoogleError, UnreachableError: as `call`.
        """
        token = ""
        while True:
            answer = self.call("GET", service, path, {"pageToken": token} if token else None)
            yield from answer.get(field, [])
            token = answer.get("nextPageToken", "")
            if not token:
                return

    def call(
        self,
        method: str,
        service: str,
        path: str,
        query: dict[str, str] | None = None,
        body: dict[str, Any] | None = None,
    ) -> dict[str, Any]:
        """The JSON answer of `service` (`tpu`) for `path` (`v2alpha1/projects/…`).

        Raises:
            GoogleError: it refused, for good or as often as we ask.
            UnreachableError: it did not answer.
        """
        url = f"{endpoint(service)}/{path}"
        fresh = False
        for attempt in range(1, ATTEMPTS + 1):
            token = self._tokens.token(fresh=fresh)
            headers = {"Authorization": f"Bearer {token}", **self._counted}
            try:
                answer = self._client.request(method, url, params=query, json=body, headers=headers)
            except httpx.TransportError as error:
                if attempt == ATTEMPTS:
                    raise UnreachableError(
                        f"expected an answer from {httpx.URL(url).host}, found {error!r}"
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


def endpoint(service: str) -> str:
    """Where a service is: `tpu` at https://tpu.googleapis.com, or where TPU_API_ENDPOINT says."""
    set_by_user = os.environ.get(f"{service.upper()}_API_ENDPOINT")
    return (set_by_user or f"https://{service}.googleapis.com").rstrip("/")


def _refusal(answer: httpx.Response) -> GoogleError:
    try:
        error = answer.json()["error"]
        status = error.get("status") or f"HTTP {answer.status_code}"
        return GoogleError(answer.status_code, str(status), str(error["message"]))
    except (ValueError, KeyError, TypeError, AttributeError):
        # A proxy's page, not the service's answer.
        return GoogleError(answer.status_code, f"HTTP {answer.status_code}", answer.text[:200])


def _may_pass(refused: GoogleError) -> bool:
    is_quota = "uota limit" in refused.message or "no more capacity" in refused.message
    return refused.code in PASSING and not is_quota
