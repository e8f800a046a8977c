"""A client of the rig's MCP server as tests use it: the SDK's own over stdin and stdout, the server a process, Google's services a fake.

The client lives in a thread of its own, so that a test reads from top to bottom; what it was asked and told is kept.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

import anyio
import anyio.from_thread
from mcp import Client
from mcp.client.stdio import StdioServerParameters, stdio_client
from mcp_types import ElicitResult, TextContent

from rig.google import Google
from rig.network import Firewall
from rig.plan import plan
from rig.settings import ROOT, Settings
from tests.rig.fake_tpu import FakeTpu, rest_door, services

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from concurrent.futures import Future
    from pathlib import Path

    from anyio.from_thread import BlockingPortal
    from mcp_types import CallToolResult, ElicitRequestParams, Tool

    from tests.rig.fake_http import Door

PATIENCE_SECONDS = 30.0
TOKEN = "a-token-of-the-user"
PROJECT = "my-project"
PARENT = f"projects/{PROJECT}/locations/us-west4-a"
NAME = f"{PARENT}/queuedResources/gemma4-rust-qr"
NODE = f"{PARENT}/nodes/gemma4-rust-qr-node"

Era = Literal["auto", "legacy"]
"""`auto` finds 2026-07-28, where a question is an answer to the call; `legacy` is 2025-11-25, where it is a request."""
ERAS: tuple[Era, ...] = ("auto", "legacy")


@dataclass
class Told:
    """What a tool answered."""

    text: str
    error: bool
    found: dict[str, Any]
    progress: list[str]


@dataclass
class Talk:
    """One client and its server process."""

    client: Client
    portal: BlockingPortal
    pid_file: Path
    log_file: Path
    asked: list[str] = field(default_factory=list)
    """Every question put to the user."""
    says: Callable[[str], ElicitResult] = lambda _: yes()
    """What the user answers."""
    on_progress: Callable[[str], object] = lambda _: None

    def call(self, tool: str, **arguments: Any) -> Told:
        """One call, to its end."""
        return self.begin(tool, **arguments).result(PATIENCE_SECONDS)

    def begin(self, tool: str, **arguments: Any) -> Future[Told]:
        """One call, which goes on; `cancel()` cancels it as a client does."""
        return self.portal.start_task_soon(self._call, tool, arguments)

    def tools(self) -> dict[str, Tool]:
        """What there is."""
        listed = self.portal.call(self.client.list_tools)
        return {tool.name: tool for tool in listed.tools}

    @property
    def pid(self) -> int:
        """Of the server."""
        return int(self.pid_file.read_text())

    @property
    def log(self) -> str:
        """What the server wrote to stderr."""
        return self.log_file.read_text()

    def kill(self) -> None:
        """`kill -9` to the server."""
        os.kill(self.pid, signal.SIGKILL)

    async def _call(self, tool: str, arguments: dict[str, Any]) -> Told:
        lines: list[str] = []

        async def on_progress(progress: float, total: float | None, message: str | None) -> None:
            lines.append(message or "")
            self.on_progress(message or "")

        result: CallToolResult = await self.client.call_tool(
            tool, arguments, progress_callback=on_progress
        )
        text = "\n".join(one.text for one in result.content if isinstance(one, TextContent))
        return Told(text, bool(result.is_error), result.structured_content or {}, lines)

    async def _answer(self, _: object, params: ElicitRequestParams) -> ElicitResult:
        self.asked.append(params.message)
        return self.says(params.message)


def yes(**content: Any) -> ElicitResult:
    """The user agrees."""
    return ElicitResult(action="accept", content=content or {"proceed": True})


def no(_: str) -> ElicitResult:
    """The user says no."""
    return ElicitResult(action="decline")


def closes(_: str) -> ElicitResult:
    """The user closes the question."""
    return ElicitResult(action="cancel")


def types_name(name: str = "gemma4-rust-qr") -> Callable[[str], ElicitResult]:
    """The user types a name."""
    return lambda _: yes(name=name)


class _Token:
    def token(self, *, fresh: bool = False) -> str:
        return TOKEN


class World:
    """A cloud, a folder with settings, and whoever talks to a server."""

    def __init__(self, tpu: FakeTpu, door: Door, place: Path) -> None:
        self.tpu, self.door, self.place = tpu, door, place
        self.settings_file, self.state = place / "tpu.env", place / "state"
        self._open = contextlib.ExitStack()
        self._talks: dict[tuple[Era, bool], Talk] = {}
        self._made = 0

    def reset(self) -> None:
        """A new cloud behind the same door, with the way in open; no records; settings as they come."""
        self.tpu.__dict__.update(FakeTpu().__dict__)
        self.slow_changes = self.tpu.project.change
        self.tpu.project.change = self._changed_at_once  # type: ignore[method-assign]
        self.settings()
        self._forget_records()
        with Google(_Token()) as google:
            # Here, where its pauses cost nothing.
            Firewall(google, Settings(project_id=PROJECT), sleep=lambda _: None).open()
        self.tpu.calls.clear()

    def settings(self, **changed: str) -> None:
        """tpu.env as it is published, with a project and what is changed."""
        lines = (ROOT / "tpu.env").read_text().splitlines()
        values = {"PROJECT_ID": PROJECT, **changed}
        kept = [line for line in lines if line.partition("=")[0] not in values]
        added = [f"{key}={value}" for key, value in values.items()]
        self.settings_file.write_text("\n".join([*kept, *added]) + "\n")

    def there(self, state: str = "CREATING") -> None:
        """There is a VM, asked for by somebody else's rig."""
        wanted = plan(Settings(project_id=PROJECT), {})
        self.tpu.create(wanted.parent, {"queuedResourceId": wanted.queued_resource_id}, wanted.body)
        self.tpu.tick(to=state)

    def _changed_at_once(self, target: str, effect: Callable[[], object]) -> dict[str, Any]:
        """A change of Compute Engine's without the seconds that it takes."""
        answer = self.slow_changes(target, effect)
        effect()
        return {**answer, "status": "DONE"}

    def talk(self, era: Era = "auto", *, asks: bool = True) -> Talk:
        """The client of that kind, which tests share; its user agrees to costs."""
        if (era, asks) not in self._talks:
            self._talks[era, asks] = self.another(era, asks=asks)
        found = self._talks[era, asks]
        found.asked.clear()
        found.says, found.on_progress = lambda _: yes(), lambda _: None
        return found

    def another(self, era: Era = "auto", *, asks: bool = True) -> Talk:
        """A client and a server of one's own."""
        self._made += 1
        pid, log = (self.place / f"{self._made}.{kind}" for kind in ("pid", "log"))
        server = f"echo $$ >{pid}; exec {sys.executable} -m rig.mcp_server --poll-seconds 0.05"
        parameters = StdioServerParameters(
            command="sh", args=["-c", server], cwd=ROOT, env=self.environment
        )
        errors = self._open.enter_context(log.open("w"))
        talk: Talk

        async def answer(context: object, params: ElicitRequestParams) -> ElicitResult:
            return await talk._answer(context, params)

        client = Client(
            stdio_client(parameters, errlog=errors),
            mode=era,
            elicitation_callback=answer if asks else None,
        )
        portal = self._open.enter_context(anyio.from_thread.start_blocking_portal())
        talk = Talk(client, portal, pid, log)
        self._open.enter_context(portal.wrap_async_context_manager(client))
        return talk

    @property
    def environment(self) -> dict[str, str]:
        """Of a server."""
        return {
            **services(self.door),
            "GOOGLE_OAUTH_ACCESS_TOKEN": TOKEN,
            "RIG_SETTINGS": str(self.settings_file),
            "XDG_STATE_HOME": str(self.state),
        }

    def made(self) -> list[str]:
        """Queued resources that there are."""
        return list(self.tpu.resources)

    def asked_for(self) -> list[str]:
        """Ids of the requests to create one, once for each time that it was asked."""
        return [
            call.query["requestId"]
            for call in self.tpu.calls
            if call.method == "POST" and call.path.endswith("/queuedResources")
        ]

    def key(self) -> str:
        """The API key of the VM."""
        (file,) = self.state.rglob("api-key")
        return file.read_text()

    def close(self) -> None:
        """End every server and the cloud."""
        self._open.close()

    def _forget_records(self) -> None:
        for file in sorted(self.state.rglob("*"), reverse=True):
            file.unlink() if file.is_file() else file.rmdir()


@contextlib.contextmanager
def cloud(place: Path) -> Iterator[World]:
    """A world for many tests; `reset` it for each."""
    tpu = FakeTpu()
    with rest_door(tpu) as door, contextlib.closing(World(tpu, door, place)) as world:
        yield world


class Held:
    """A step of the service that waits until a test lets it go on."""

    def __init__(self, step: Callable[..., Any]) -> None:
        self.step = step
        self._arrived, self._released = threading.Event(), threading.Event()
        self.outcome: BaseException | None = None
        """Raised in place of the step."""

    def __call__(self, *arguments: Any) -> Any:
        self._arrived.set()
        assert self._released.wait(PATIENCE_SECONDS), "nobody released the service"
        if self.outcome:
            raise self.outcome
        return self.step(*arguments)

    def wait(self) -> None:
        """Until somebody asked for it."""
        assert self._arrived.wait(PATIENCE_SECONDS), "nobody asked the service"

    def release(self) -> None:
        """Let it go on."""
        self._released.set()
