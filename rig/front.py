"""One address for several servers: our proxy in front, vllm-router behind it, and a thread that keeps the router's workers right.

Knows servers by their addresses: where these come from is the caller's business.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import secrets
import socket
import threading
import time
from typing import TYPE_CHECKING

import httpx
import uvicorn
from starlette.responses import JSONResponse
from starlette.routing import Route

from rig.errors import RigError
from rig.google import GoogleError, UnreachableError
from rig.proxy import ANY, NoUpstreamError, proxy
from rig.records import home
from rig.router import METRICS_PORT, Router, RouterError, RouterFailedError
from rig.tokens import TokenError

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Sequence
    from pathlib import Path
    from types import FrameType

    from starlette.requests import Request
    from starlette.responses import Response

LOOPBACK = frozenset({"127.0.0.1", "localhost", "::1"})
LOOK_SECONDS = 15.0
"""Guest attributes may be asked for ten times a minute and no more."""
HEALTH_SECONDS = 3.0
# How soon a router that died is noticed.
WATCH_SECONDS = 0.25
STOP_SECONDS = 10.0
# After a signal, streams get this long to end.
DRAIN_SECONDS = 10
PASSED = ("/v1/", "/metrics")


class FrontError(RigError):
    """The address cannot be served; the text says why and what to do."""


def serve_fleet(
    find_workers: Callable[[], Sequence[str]],
    worker_key: str | None,
    caller_key: str | None,
    host: str,
    port: int,
    router_port: int,
    on_event: Callable[[str], object],
    *,
    names: Collection[str] = (),
    metrics_port: int = METRICS_PORT,
    look_seconds: float = LOOK_SECONDS,
    log: Path | None = None,
) -> None:
    """Serve all of `find_workers()` at `host:port` until SIGINT or SIGTERM; called on the main thread.

    `find_workers` is asked every `look_seconds`; of what it finds, those get requests whose `/health` says that they serve. While it
    raises RigError, GoogleError, UnreachableError or TokenError nothing changes. `names` are those by which callers may call this machine
    on loopback, besides its own.

    Raises:
        FrontError: the address cannot be listened on, or is open to others without a key.
        RouterError: vllm-router is not installed, or does not start.
    """
    if host not in LOOPBACK and not caller_key:
        raise FrontError(
            f"expected a key for callers with --host {host}, found none: without one, others could use the workers"
        )
    log = log or home() / f"router-{router_port}.log"
    # Where workers ask for no key, one that nobody else has keeps others from changing the router.
    router = Router(router_port, worker_key or secrets.token_urlsafe(32), log, metrics_port)
    with contextlib.closing(router), _listening(host, port) as listener:
        keeper = Keeper(router, find_workers, on_event, look_seconds)
        app = proxy(
            keeper.upstream,
            upstream_key=lambda: router.key,
            caller_key=caller_key,
            # Where a key is asked for, a page that was made to lead here gets nothing: any name will do.
            names={ANY} if host not in LOOPBACK else names,
            passes=passes,
            routes=[Route("/health", keeper.health, methods=["GET"])],
            hop="The fleet's proxy",
        )
        front = Front(
            uvicorn.Config(
                app,
                log_config=None,
                access_log=False,
                server_header=False,
                date_header=False,
                # What is tested, whatever else is installed.
                http="h11",
                loop="asyncio",
                ws="none",
                timeout_graceful_shutdown=DRAIN_SECONDS,
            )
        )
        on_event(f"listening on http://{host}:{listener.getsockname()[1]}/v1; router's log: {log}")
        keeper.start(front.end)
        try:
            front.run(sockets=[listener])
        finally:
            keeper.stop()
    if keeper.fault is not None:
        raise keeper.fault


def passes(path: str) -> bool:
    """Whether the router may see `path`: the servers' API, and nothing by which the router is changed. `/metrics` is one server's, whichever."""
    return path.startswith(PASSED) and ".." not in path.split("/")


class Front(uvicorn.Server):
    """uvicorn, except that it returns after a signal: by itself it would raise the signal anew, before the router is ended."""

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """First signal: let streams end. Second: do not."""
        self.force_exit = self.should_exit
        self.should_exit = True

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Let the app close its connections also when there is no time for streams."""
        await super().shutdown(sockets)
        if self.force_exit:
            await self.lifespan.shutdown()

    def end(self) -> None:
        """As a signal does, from any thread."""
        self.should_exit = True


class Keeper:
    """Looks for workers and tells the router; starts it when there is one, and anew when it died. A thread of its own."""

    def __init__(
        self,
        router: Router,
        find_workers: Callable[[], Sequence[str]],
        on_event: Callable[[str], object],
        look_seconds: float,
    ) -> None:
        self.fault: RigError | None = None
        self._router, self._find, self._tell = router, find_workers, on_event
        self._look_seconds = look_seconds
        self._serving: frozenset[str] = frozenset()
        self._was_started = False
        self._last_said = ""
        self._stopping = threading.Event()
        # It may be deep in a call to Google when everything else ends.
        self._thread = threading.Thread(target=self._run, name="keeper", daemon=True)

    def start(self, end: Callable[[], None]) -> None:
        """Begin; `end` is called when this one cannot go on."""
        self._end = end
        self._thread.start()

    def stop(self) -> None:
        """Change nothing any more, and have no router."""
        self._stopping.set()
        self._router.stop()
        self._thread.join(STOP_SECONDS)

    def upstream(self) -> str:
        """The router, if it has anyone to give requests to."""
        if not self._serving:
            raise NoUpstreamError(
                "No server of the fleet serves now; `torchtpu-rig fleet status` shows where each VM stands."
            )
        return self._router.url

    async def health(self, request: Request) -> Response:
        """200 while requests can be served."""
        count = len(self._serving)
        body = {"status": "ok" if count else "no workers", "workers": count}
        return JSONResponse(body, 200 if count else 503)

    # -- on the thread ---------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            with (
                httpx.Client(timeout=HEALTH_SECONDS, trust_env=False) as client,
                concurrent.futures.ThreadPoolExecutor(16) as pool,
            ):
                next_look = 0.0
                while not self._stopping.is_set():
                    if self._router.ended is not None:
                        self._replace(f"ended with status {self._router.ended}")
                    if time.monotonic() >= next_look:
                        self._look(client, pool)
                        next_look = time.monotonic() + self._look_seconds
                    self._stopping.wait(min(WATCH_SECONDS, self._look_seconds))
        except RouterError as error:
            # One that was told to end while it started is no fault.
            self.fault = None if self._stopping.is_set() else error
        finally:
            # Without this thread nobody would notice who comes and goes.
            if not self._stopping.is_set():
                self.fault = self.fault or FrontError("the search for servers ended with an error")
                self._end()

    def _look(self, client: httpx.Client, pool: concurrent.futures.Executor) -> None:
        try:
            found = list(dict.fromkeys(url.rstrip("/") for url in self._find()))
        except (RigError, GoogleError, UnreachableError, TokenError) as error:
            self._say(f"could not look for servers, so nothing changes: {error}")
            return
        if self._stopping.is_set():
            return
        answers = pool.map(lambda url: _serves(client, url), found)
        healthy = [url for url, serves in zip(found, answers, strict=True) if serves]
        if not self._router.is_running:
            if healthy:
                self._start(healthy)
            else:
                self._say(f"no server serves yet ({len(found)} found)")
            return
        try:
            known = self._router.workers()
        except RouterError as error:
            # If it has ended, that is told in a moment.
            if self._router.is_running:
                self._replace(f"does not answer ({error})")
            return
        self._serving = known & set(healthy)
        for url in known - self._serving:
            self._change(self._router.remove, url, "removed: it is gone or does not serve")
        for url in healthy:
            if url not in known:
                self._change(self._router.add, url, "added")

    def _change(self, do: Callable[[str], None], url: str, told: str) -> None:
        try:
            do(url)
        except RouterError as error:
            self._say(str(error))
            return
        if told == "added":
            self._serving |= {url}
        self._say(f"{url} {told}; {len(self._serving)} serve now")

    def _start(self, workers: Sequence[str]) -> None:
        try:
            self._router.start(workers)
        except RouterError as error:
            self._serving = frozenset()
            if isinstance(error, RouterFailedError) and not self._was_started:
                raise
            self._say(f"the router could not be started: {error}")
            return
        self._was_started = True
        self._serving = frozenset(workers)
        self._say(f"the router gives requests to {', '.join(workers)}")

    def _replace(self, what: str) -> None:
        self._say(
            f"the router {what} and is started anew; its last words: {self._router.last_words()}"
        )
        self._router.stop()
        if self._serving:
            self._start(sorted(self._serving))

    def _say(self, text: str) -> None:
        if text != self._last_said:
            self._tell(text)
        self._last_said = text


def _serves(client: httpx.Client, url: str) -> bool:
    try:
        return client.get(f"{url}/health").status_code == httpx.codes.OK
    except (httpx.TransportError, httpx.InvalidURL):
        return False


@contextlib.contextmanager
def _listening(host: str, port: int) -> Iterator[socket.socket]:
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, proto=socket.IPPROTO_TCP, flags=socket.AI_PASSIVE
        )[0]
        # Its protocol is named: only then does asyncio set TCP_NODELAY, without which small pieces wait 40 ms.
        listener = socket.socket(family, kind, protocol)
    except OSError as error:
        raise FrontError(
            f"expected an address to listen on, found {host}:{port}: {error}"
        ) from error
    with listener:
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(address)
            listener.listen(2048)
        except OSError as error:
            raise FrontError(
                f"expected to listen on {host}:{port}, found {error.strerror}; give another --port"
            ) from error
        yield listener
