"""How a tool call works with the rig: with the settings as they are now, in a thread, and with errors that the model can act on.

Whoever calls may be cancelled at any time: a thread is then left to end by itself, so each opens and closes what it needs.
"""

from __future__ import annotations

import contextlib
import re
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeVar

import anyio.from_thread
import anyio.to_thread
from mcp.server.mcpserver import Context
from mcp.server.mcpserver.exceptions import ToolError
from mcp_types import CallToolResult, TextContent

from bench.load.wire import BenchmarkError
from rig import session
from rig.session import opened
from rig.settings import SettingsError, read

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from pydantic import BaseModel

    from rig.session import Session
    from rig.settings import Settings

T = TypeVar("T")

FAULTS = (*session.FAULTS, SettingsError, BenchmarkError)
"""What a user or the service can cause; anything else is a fault of ours and stays on stderr."""

# What the rig's sentences call by its command, a model calls by its tool.
TOOLS = {
    "create": "create_tpu_queued_resource",
    "delete": "delete_tpu_queued_resource",
    "status": "get_queued_resource",
    "watch": "get_rig_progress",
    "logs": "get_boot_log",
    "doctor": "rig_doctor",
    "capacity": "find_tpu_capacity",
    "cost": "estimate_cost",
    "check": "check_endpoint",
}


@dataclass(frozen=True)
class World:
    """What the process was started with."""

    settings_file: Path
    poll_seconds: float


Ctx = Context[World, Any]


def world(ctx: Ctx) -> World:
    """That of the server which `ctx` belongs to."""
    found: World = ctx.request_context.lifespan_context
    return found


def settings(ctx: Ctx, *, hours: float | None = None, **given: Any) -> Settings:
    """The file's settings as they are now, in which what the call gives wins.

    Raises:
        ToolError: a key is wrong, or no project is set.
    """
    if hours is not None:
        given["max_run_duration"] = timedelta(hours=hours)
    with told():
        found = read(world(ctx).settings_file, **given)
        _ = found.parent  # Every tool needs a project.
        return found


async def in_session(ctx: Ctx, wanted: Settings, work: Callable[[Session], T]) -> T:
    """`work` in a thread, with a session of its own.

    Raises:
        ToolError: what `work` raised that a user can do something about.
    """

    def run() -> T:
        with opened(wanted, world(ctx).poll_seconds) as session:
            return work(session)

    with told():
        return await anyio.to_thread.run_sync(run, abandon_on_cancel=True)


def report(ctx: Ctx, done: float, total: float | None, text: str) -> None:
    """Progress, from a thread of `in_session`.

    Raises:
        BaseException: the event loop's own for it, when the call was cancelled.
    """
    anyio.from_thread.check_cancelled()
    anyio.from_thread.run(ctx.report_progress, done, total, text)


@contextlib.contextmanager
def told() -> Iterator[None]:
    """Faults as errors that the model reads, in the words of the tools."""
    try:
        yield
    except FAULTS as error:
        raise ToolError(in_tools_words(str(error))) from error


def in_tools_words(text: str) -> str:
    """`torchtpu-rig delete` as `delete_tpu_queued_resource`; commands that are no tools stay."""
    return re.sub(
        r"torchtpu-rig (\w+)(?![\w-]| --)", lambda found: TOOLS.get(found[1], found[0]), text
    )


def answer(result: BaseModel, text: str | None = None) -> CallToolResult:
    """A typed result and its text for people."""
    content = TextContent(type="text", text=in_tools_words(text or str(result)))
    found = result.model_dump(mode="json")
    return CallToolResult(content=[content], structured_content=_advised(found))


def _advised(found: Any) -> Any:
    """The same with advice in the tools' words; what a VM or the service said is left as it was said."""
    if isinstance(found, list):
        return [_advised(one) for one in found]
    if isinstance(found, dict):
        return {
            key: in_tools_words(one) if key in {"advice", "do"} and one else _advised(one)
            for key, one in found.items()
        }
    return found
