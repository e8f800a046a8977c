"""When the shim looks again, and what it does until it knows: with looks and hops that a test decides."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections import deque
from typing import TYPE_CHECKING

import httpx
import pytest

from demo import upstream as module
from demo.places import LookError, Place
from demo.upstream import Upstream, Watched
from rig.proxy import RefusedError
from tests.fakes import PATIENCE_SECONDS

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

OLD, NEW = Place("vm", "http://192.0.2.1:8000", "old-key"), Place("vm", "http://192.0.2.2:8000")


class Hops(httpx.AsyncBaseTransport):
    """What happens to requests: errors are taken one by one, then everything is answered."""

    def __init__(self, *errors: httpx.TransportError) -> None:
        self.errors = deque(errors)
        self.asked: list[httpx.Request] = []
        self.status = 200

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        self.asked.append(request)
        if self.errors:
            raise self.errors.popleft()
        return httpx.Response(self.status)


class World:
    """An upstream, and requests through it."""

    def __init__(self, *places: Place | Exception, errors: tuple[httpx.TransportError, ...] = ()):
        self.places, self.looks = deque(places), 0
        self.hops = Hops(*errors)
        self.upstream = Upstream(self.look, self.hops, 0.0)
        self.client = httpx.AsyncClient(transport=Watched(self.hops, self.upstream))

    def look(self) -> Place:
        self.looks += 1
        found = self.places[0]
        if len(self.places) > 1:
            self.places.popleft()
        if isinstance(found, Exception):
            raise found
        return found

    async def request(self) -> int:
        """A request, as the proxy makes it: its status, or that of the refusal."""
        try:
            return (await self.client.get(f"{self.upstream.url()}/v1/models")).status_code
        except RefusedError as refused:
            return refused.status

    async def until(self, condition: Callable[[], bool]) -> None:
        """What is going on has gone on until then."""
        async with asyncio.timeout(PATIENCE_SECONDS):
            while not condition():  # noqa: ASYNC110 - what happens has no event
                await asyncio.sleep(0.01)

    def run(self, work: Callable[[World], Awaitable[None]]) -> None:
        async def all_of_it() -> None:
            await self.upstream.look_first()
            try:
                await work(self)
            finally:
                await self.upstream.aclose()
                await self.client.aclose()

        asyncio.run(all_of_it())


def _answers(world: World) -> bool:
    try:
        return bool(world.upstream.url())
    except RefusedError:
        return False


@pytest.fixture(autouse=True)
def no_probes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody looks whether the server is back, unless a test wants it."""
    monkeypatch.setattr(module, "PROBE_SECONDS", 1e9)


def test_three_timeouts_in_a_row_are_enough_and_two_are_not() -> None:
    slow, lost = httpx.ConnectTimeout("slow"), httpx.ReadError("lost")

    async def work(world: World) -> None:
        assert [await world.request() for _ in range(3)] == [504, 502, 200]
        world.hops.errors.extend([slow, lost, slow])
        # The fourth is not tried.
        assert [await world.request() for _ in range(4)] == [504, 502, 504, 503]
        assert len(world.hops.asked) == 6

    World(OLD, errors=(slow, lost)).run(work)


def test_a_refused_connection_is_enough_and_the_next_place_is_tried() -> None:
    async def work(world: World) -> None:
        assert await world.request() == 502
        await world.until(lambda: _answers(world))
        assert world.upstream.url() == NEW.url
        assert await world.request() == 200
        assert world.looks == 2

    World(OLD, NEW, errors=(httpx.ConnectError("Connection refused"),)).run(work)


def test_what_is_known_stays_while_a_look_fails_and_the_failure_is_told() -> None:
    async def work(world: World) -> None:
        assert await world.request() == 502
        await world.until(lambda: world.looks >= 2)
        with pytest.raises(RefusedError, match=r"laptop → VM.*Google is away"):
            world.upstream.url()
        world.upstream.answered(httpx.URL(OLD.url or ""), 200)
        assert world.upstream.url() == OLD.url
        assert (await world.upstream.status())["error"] == "Google is away"

    gone = LookError("Google is away")
    World(OLD, gone, errors=(httpx.ConnectError("Connection refused"),)).run(work)


def test_an_address_that_answers_is_looked_up_again_now_and_then(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def work(world: World) -> None:
        for _ in range(20):
            await world.request()
        assert world.looks == 1
        monkeypatch.setattr(module, "STALE_SECONDS", 0.0)
        await world.until(lambda: world.upstream.url() == NEW.url)
        assert world.upstream.key() is None

    World(OLD, NEW).run(work)


def test_a_vm_that_is_gone_gets_no_more_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "STALE_SECONDS", 0.0)
    absent = Place("vm", problem="There is no VM.", phase="absent")

    async def work(world: World) -> None:
        with pytest.raises(RefusedError, match=r"There is no VM\."):
            await world.until(lambda: not world.upstream.url())
        before = len(world.hops.asked)
        assert await world.request() == 503
        assert len(world.hops.asked) == before

    World(OLD, absent).run(work)


def test_a_late_failure_of_an_old_address_is_not_the_new_ones() -> None:
    async def work(world: World) -> None:
        refused = world.upstream.failed(httpx.URL(OLD.url or ""), httpx.ConnectError("refused"))
        assert "192.0.2.1:8000 took no connection" in str(refused)
        assert world.upstream.url() == NEW.url

    World(NEW).run(work)


def test_the_server_is_probed_without_the_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PROBE_SECONDS", 0.0)

    async def work(world: World) -> None:
        assert (await world.upstream.status())["health"] == 200
        (probe,) = world.hops.asked
        assert probe.url == f"{OLD.url}/health"
        assert "old-key" not in str(probe.headers.raw)
        world.hops.status = 503
        assert (await world.upstream.status())["health"] == 503
        # It answers, so requests are for it to refuse.
        assert world.upstream.url() == OLD.url
        world.hops.errors.append(httpx.ConnectError("refused"))
        found = await world.upstream.status()
        assert found["health"] is None
        assert "took no connection (refused)" in found["error"]
        await world.until(lambda: _answers(world))

    World(OLD).run(work)


def test_a_fault_in_a_look_is_in_the_log_and_the_next_look_is_made(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def work(world: World) -> None:
        await world.until(lambda: _answers(world))

    with caplog.at_level(logging.ERROR):
        World(ZeroDivisionError("a fault of ours"), OLD).run(work)
    assert "the search for the server ended with an error" in caplog.text
    assert "a fault of ours" in caplog.text


def test_the_end_does_not_wait_for_a_look_that_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "FIRST_LOOK_SECONDS", 0.01)
    release = threading.Event()
    looked = threading.Event()

    def hang() -> Place:
        release.wait(PATIENCE_SECONDS)
        looked.set()
        return OLD

    async def work() -> None:
        upstream = Upstream(hang, Hops())
        found = await upstream.status()
        assert (found["upstream"], found["error"]) == (None, "The shim is looking for its server.")
        with pytest.raises(RefusedError, match="looking for its server"):
            upstream.url()
        await upstream.aclose()
        assert not looked.is_set()

    try:
        asyncio.run(work())
    finally:
        release.set()
    assert looked.wait(PATIENCE_SECONDS)
