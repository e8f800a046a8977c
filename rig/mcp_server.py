"""`torchtpu-rig-mcp`: the rig for an MCP client, over stdin and stdout, with the user's own credentials. stdout is the protocol's alone.

Settings are those of RIG_SETTINGS, else of tpu.env in the client's project, else of this tree, read at each call.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.metadata
import logging
import os
import sys
import tomllib
from pathlib import Path
from typing import TYPE_CHECKING

from mcp.server import MCPServer
from mcp_types import ToolAnnotations

from rig.mcp import tools
from rig.mcp.calls import World
from rig.provision import POLL_SECONDS
from rig.settings import FILE, ROOT

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Mapping

NAME = "torchtpu-rig"
INSTRUCTIONS = """\
Creates, watches and deletes one Cloud TPU v5e VM that serves Gemma 4 with the model in Rust.
Order: estimate_cost and rig_doctor (free) → create_tpu_queued_resource (asks the user; costs from the moment the VM runs) →
get_rig_progress with wait_seconds until it serves → check_endpoint → run_rust_benchmark → delete_tpu_queued_resource (asks the user).
A VM costs until it is deleted: say so, and offer to delete it when the user is done. FAILED and SUSPENDED resources hold quota until deleted.
"""

_LOOKS = ToolAnnotations(
    read_only_hint=True, destructive_hint=False, idempotent_hint=True, open_world_hint=True
)
_USES = ToolAnnotations(
    read_only_hint=False, destructive_hint=False, idempotent_hint=True, open_world_hint=True
)
_DELETES = ToolAnnotations(
    read_only_hint=False, destructive_hint=True, idempotent_hint=True, open_world_hint=True
)

TOOLS = (
    (tools.create_tpu_queued_resource, "Create the TPU VM", _USES),
    (tools.get_rig_progress, "Follow the boot", _LOOKS),
    (tools.get_queued_resource, "Show the queued resource", _LOOKS),
    (tools.delete_tpu_queued_resource, "Delete the TPU VM", _DELETES),
    (tools.find_tpu_capacity, "Find zones with the chip", _LOOKS),
    (tools.estimate_cost, "Estimate the cost", _LOOKS),
    (tools.rig_doctor, "Look for obstacles", _LOOKS),
    (tools.get_boot_log, "Show the boot's log", _LOOKS),
    (tools.check_endpoint, "Ask the server", _LOOKS),
    (tools.run_rust_benchmark, "Measure the server", _USES),
)


def build(world: World) -> MCPServer[World]:
    """The server with its tools."""

    @contextlib.asynccontextmanager
    async def lifespan(_: MCPServer[World]) -> AsyncIterator[World]:
        yield world

    server = MCPServer(
        NAME,
        title="Gemma 4 in Rust on a Cloud TPU",
        instructions=INSTRUCTIONS,
        version=package_version(),
        lifespan=lifespan,
    )
    for tool, title, hints in TOOLS:
        server.add_tool(tool, title=title, annotations=hints)
    return server


def settings_file(environment: Mapping[str, str]) -> Path:
    """Where the settings are; whether the file exists is asked at each call."""
    if named := environment.get("RIG_SETTINGS"):
        return Path(named)
    project = environment.get("CLAUDE_PROJECT_DIR")
    if project and (own := Path(project) / "tpu.env").is_file():
        return own
    return FILE


def main() -> None:
    """The entry point."""
    parser = argparse.ArgumentParser(prog="torchtpu-rig-mcp", description=__doc__)
    parser.add_argument("--poll-seconds", type=float, default=POLL_SECONDS, help=argparse.SUPPRESS)
    given = parser.parse_args()
    # Before the SDK sets up its own, whose lines are made for terminals.
    logging.basicConfig(stream=sys.stderr, level=logging.WARNING, format="%(name)s: %(message)s")
    world = World(settings_file(os.environ), given.poll_seconds)
    build(world).run()


def package_version() -> str:
    """Of this tree."""
    try:
        return importlib.metadata.version("torchtpu-rs")
    except importlib.metadata.PackageNotFoundError:
        # Started from the tree, where nothing is installed.
        crate = tomllib.loads((ROOT / "rust" / "Cargo.toml").read_text())
        return str(crate["package"]["version"])


if __name__ == "__main__":
    main()
