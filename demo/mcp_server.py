"""`torchtpu-rs-demo`: the model for an MCP client, over stdin and stdout, through the shim. stdout is the protocol's alone.

The shim is at http://127.0.0.1:8015, or where TORCHTPU_SHIM_URL says.
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import os
import sys
from typing import TYPE_CHECKING

import httpx
from mcp.server import MCPServer
from mcp_types import ToolAnnotations

from demo import tools
from demo.asking import Asker
from rig.mcp_server import package_version

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

NAME = "torchtpu-rs-demo"
SHIM = "http://127.0.0.1:8015"
INSTRUCTIONS = """\
Talks to Gemma 4 E2B, whose model is Rust on a PyTorch device (a Cloud TPU where the rig has one), through a shim on this machine.
ask_gemma_rust and stream_gemma_rust ask it; engine_info and serving_metrics say what runs and how it does.
When something fails, endpoint_status says which hop does. This server creates and deletes nothing.
"""

_ASKS = ToolAnnotations(
    read_only_hint=True, destructive_hint=False, idempotent_hint=True, open_world_hint=False
)

TOOLS = (
    (tools.ask_gemma_rust, "Ask Gemma in Rust"),
    (tools.stream_gemma_rust, "Ask Gemma in Rust, streamed"),
    (tools.engine_info, "What is loaded"),
    (tools.endpoint_status, "Where requests go"),
    (tools.serving_metrics, "What the server counted"),
)


def build(url: str) -> MCPServer[Asker]:
    """The server with its tools, which ask the shim at `url`."""

    @contextlib.asynccontextmanager
    async def lifespan(_: MCPServer[Asker]) -> AsyncIterator[Asker]:
        async with Asker(url) as asker:
            yield asker

    server = MCPServer(
        NAME,
        title="Gemma 4 in Rust, through the local shim",
        instructions=INSTRUCTIONS,
        version=package_version(),
        lifespan=lifespan,
    )
    for tool, title in TOOLS:
        server.add_tool(tool, title=title, annotations=_ASKS)
    return server


def shim_url(text: str) -> str:
    """The shim's address as `Asker` wants it.

    Raises:
        ValueError: `text` is not one.
    """
    try:
        url = httpx.URL(text.strip())
    except httpx.InvalidURL:
        url = httpx.URL("")
    if url.scheme not in {"http", "https"} or not url.host:
        raise ValueError(f"TORCHTPU_SHIM_URL: expected an address like {SHIM}, found {text!r}")
    return str(url).rstrip("/").removesuffix("/v1").rstrip("/")


def main() -> None:
    """The entry point."""
    argparse.ArgumentParser(prog=NAME, description=__doc__).parse_args()
    # Before the SDK sets up its own, whose lines are made for terminals.
    logging.basicConfig(stream=sys.stderr, level=logging.WARNING, format="%(name)s: %(message)s")
    try:
        url = shim_url(os.environ.get("TORCHTPU_SHIM_URL") or SHIM)
    except ValueError as error:
        sys.exit(f"{NAME}: {error}")
    build(url).run()


if __name__ == "__main__":
    main()
