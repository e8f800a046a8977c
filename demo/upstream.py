"""Where requests go, as it is known now: looked up in a thread, kept, and looked up anew when nobody answers there.

Lives on the event loop and does nothing unless it is asked: each request and each question for the status starts what is due.
Knows how a place is found by `places.Look` only, and how a request ended by what `Watched` tells.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import logging
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

import httpx

from demo.places import LookError, Place
from rig.proxy import RefusedError

if TYPE_CHECKING:
    from collections.abc import Coroutine

    from demo.places import Look

logger = logging.getLogger(__name__)

LOOK_SECONDS = 15.0
"""Between two looks: guest attributes may be asked for ten times a minute and no more."""
# An address of Google's pool is somebody else's after the VM has ended: what answers there is looked up anew now and then.
STALE_SECONDS = 60.0
PROBE_SECONDS, PROBE_LIMIT = 1.0, 3.0
# How long the start and a question for the status wait for the first look.
FIRST_LOOK_SECONDS = 2.0
FAILURES = 3
NEVER = float("-inf")

Origin = tuple[str, bytes]
"""Scheme, and host with port."""


class Upstream:
    """The server behind the shim."""

    def __init__(
        self,
        look: Look,
        transport: httpx.AsyncBaseTransport,
        look_seconds: float = LOOK_SECONDS,
    ) -> None:
        self._look, self._look_seconds = look, look_seconds
        # Without the key: who answers at an old address is not known.
        self._client = httpx.AsyncClient(transport=transport, trust_env=False)
        self._place: Place | None = None
        self._at: Origin | None = None
        self._trouble: str | None = None
        self._down: _Fault | None = None
        self._failures = 0
        self._health: int | None = None
        self._looked_at = self._probed_at = NEVER
        self._looking: asyncio.Task[None] | None = None
        self._probing: asyncio.Task[None] | None = None

    async def aclose(self) -> None:
        """Stop what is on its way; a look that hangs is left to its thread."""
        tasks = [task for task in (self._looking, self._probing) if task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._client.aclose()

    # -- for the proxy -----------------------------------------------------------------------------------

    def url(self) -> str:
        """Where this request goes.

        Raises:
            RefusedError: nowhere; its text says which hop fails.
        """
        self.refresh()
        place = self._place
        if place is None:
            raise _refused(self._trouble or "The shim is looking for its server.", "no_upstream")
        if place.url is None:
            raise _refused(place.problem or "There is no server.", "no_upstream")
        if self._down is not None:
            self._probe()
            raise _refused(_said(place, self._down, self._trouble), self._down.code)
        return place.url

    def key(self) -> str | None:
        """The server's API key."""
        return self._place.key if self._place else None

    def answered(self, url: httpx.URL, status: int) -> None:
        """A request had an answer with this HTTP status."""
        if _origin(url) != self._at:
            # It has moved meanwhile.
            return
        if self._down is not None:
            logger.info("%s answers again", _text(self._at))
        self._failures, self._down = 0, None
        if status == httpx.codes.UNAUTHORIZED:
            # A new VM may be at the old one's address.
            self._look_again()

    def failed(self, url: httpx.URL, error: httpx.TransportError) -> RefusedError:
        """A request had none: what to answer in its place."""
        place, fault, at = self._place, _Fault.of(error), _origin(url)
        if place is None or at != self._at:
            was = Place("url", _text(at))
            return _refused(_said(was, fault), fault.code, fault.status)
        self._failures += 1
        if fault.is_final or self._failures >= FAILURES:
            if self._down is None:
                logger.warning("%s %s", place.url, fault.what)
            self._down, self._health = fault, None
            self._look_again()
        return _refused(_said(place, fault, self._trouble), fault.code, fault.status)

    # -- for people --------------------------------------------------------------------------------------

    async def status(self) -> dict[str, Any]:
        """What the chat page and the MCP server show."""
        await self.look_first()
        if self._place is not None and self._place.url is not None:
            self._probe()
            if self._probing is not None:
                await asyncio.wait({self._probing})
        place = self._place or Place("vm")
        down = _said(place, self._down, self._trouble) if self._down else None
        nothing_yet = None if self._place else "The shim is looking for its server."
        return {
            "upstream": place.url,
            "kind": place.kind,
            "health": self._health,
            "queued_resource": place.queued_resource,
            "zone": place.zone,
            "project": place.project,
            "phase": place.phase,
            "stages": place.stages,
            "stage": place.stage,
            "error": place.problem or down or self._trouble or nothing_yet,
        }

    # -- what is done about it -----------------------------------------------------------------------------

    async def look_first(self) -> None:
        """Start a look, if one is due, and wait a little for the first one."""
        self.refresh()
        if self._place is None and self._looking is not None:
            await asyncio.wait({self._looking}, timeout=FIRST_LOOK_SECONDS)

    def refresh(self) -> None:
        """Start a look, if one is due."""
        place = self._place
        is_well = place is not None and place.url is not None and self._down is None
        is_settled = is_well and place is not None and place.phase in (None, "serving")
        self._look_again(max(STALE_SECONDS, self._look_seconds) if is_settled else None)

    def _look_again(self, after_seconds: float | None = None) -> None:
        now = asyncio.get_running_loop().time()
        after = self._look_seconds if after_seconds is None else after_seconds
        if self._looking is None and now - self._looked_at >= after:
            self._looking = self._begin(self._looked())

    async def _looked(self) -> None:
        try:
            place = await _in_a_thread(self._look)
        except LookError as error:
            if str(error) != self._trouble:
                logger.warning("%s", error)
            self._trouble = str(error)
        else:
            self._trouble = None
            if self._place is None or place.url != self._place.url:
                logger.info("requests go to %s", place.url or f"nobody. {place.problem}")
                self._down, self._failures, self._health, self._probed_at = None, 0, None, NEVER
                self._at = _origin(httpx.URL(place.url)) if place.url else None
            self._place = place
        finally:
            self._looked_at, self._looking = asyncio.get_running_loop().time(), None

    def _probe(self) -> None:
        now = asyncio.get_running_loop().time()
        place = self._place
        if self._probing is None and now - self._probed_at >= PROBE_SECONDS and place and place.url:
            self._probed_at = now
            self._probing = self._begin(self._probed(place.url))

    async def _probed(self, url: str) -> None:
        try:
            async with asyncio.timeout(PROBE_LIMIT):
                answer = await self._client.get(f"{url}/health")
        except httpx.TransportError as error:
            self.failed(httpx.URL(url), error)
            self._health = None
        except TimeoutError:
            self.failed(httpx.URL(url), httpx.ReadTimeout("no answer"))
            self._health = None
        else:
            self.answered(answer.url, answer.status_code)
            if self._place is not None and self._place.url == url:
                self._health = answer.status_code
        finally:
            self._probing = None

    def _begin(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        task.add_done_callback(_told)
        return task


@dataclass(frozen=True)
class _Fault:
    """How a request ended without an answer."""

    what: str
    code: str
    status: int
    is_final: bool = False
    """There is no use in trying again."""
    was_connected: bool = False

    @classmethod
    def of(cls, error: httpx.TransportError) -> Self:
        match error:
            case httpx.ConnectError():
                return cls(f"took no connection ({error})", "upstream_unreachable", 502, True)
            case httpx.ConnectTimeout():
                return cls("took no connection in time", "upstream_timeout", 504)
            case httpx.TimeoutException():
                return cls("did not answer in time", "upstream_timeout", 504, was_connected=True)
            case _:
                what = "closed the connection without an answer"
                return cls(what, "upstream_failed", 502, was_connected=True)


def _said(place: Place, fault: _Fault, trouble: str | None = None) -> str:
    """Which hop failed, how, and what is known besides."""
    who = {"vm": "VM", "router": "router", "url": "server"}[place.kind]
    hop = f"{who}'s server" if fault.was_connected and place.kind == "vm" else f"laptop → {who}"
    parts = [f"{hop}: {place.url} {fault.what}."]
    if place.stage and place.phase == "booting":
        parts.append(f"It boots: {dict(place.stages)[place.stage]}.")
    elif place.kind == "vm" and not fault.was_connected:
        parts.append(
            "`torchtpu-rig doctor` tells whether its way in still has this machine's address."
        )
    parts.append("The shim keeps looking.")
    return " ".join([*parts, trouble] if trouble else parts)


class Watched(httpx.AsyncBaseTransport):
    """A transport whose ends are told to an `Upstream`, which says what to answer in place of a failure."""

    def __init__(self, transport: httpx.AsyncBaseTransport, upstream: Upstream) -> None:
        self._transport, self._upstream = transport, upstream

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        """Send it on.

        Raises:
            RefusedError: there was no answer.
        """
        try:
            response = await self._transport.handle_async_request(request)
        except httpx.LocalProtocolError:
            # What the caller sent cannot be said in HTTP: no fault of the server.
            raise
        except httpx.TransportError as error:
            raise self._upstream.failed(request.url, error) from error
        self._upstream.answered(request.url, response.status_code)
        return response

    async def aclose(self) -> None:
        """Close its connections."""
        await self._transport.aclose()


def _refused(text: str, code: str, status: int = 503) -> RefusedError:
    told = f"{text} (/shim/status has more.)"
    return RefusedError(status, told, code, headers={"retry-after": "5"})


def _origin(url: httpx.URL) -> Origin:
    return url.scheme, url.netloc


def _text(origin: Origin) -> str:
    return f"{origin[0]}://{origin[1].decode()}"


def _told(task: asyncio.Task[None]) -> None:
    """What nobody expected is in the log, and not lost with the task."""
    if not task.cancelled() and (error := task.exception()) is not None:
        logger.error("the search for the server ended with an error", exc_info=error)


async def _in_a_thread(look: Look) -> Place:
    """As asyncio.to_thread, but the process does not wait for a look when it ends."""
    found: concurrent.futures.Future[Place] = concurrent.futures.Future()
    found.set_running_or_notify_cancel()

    def run() -> None:
        try:
            found.set_result(look())
        except BaseException as error:  # noqa: BLE001 - raised again by whoever waits
            found.set_exception(error)

    threading.Thread(target=run, name="look", daemon=True).start()
    return await asyncio.wrap_future(found)
