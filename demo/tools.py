"""The demo's five tools: each asks the shim, and answers with a model of `demo/results.py` and its text.

Annotations are read when the tools are registered, so what they name is imported for good.
"""

from __future__ import annotations

import contextlib
import time
from typing import TYPE_CHECKING, Annotated, Any

from mcp.server.mcpserver import Context
from mcp.server.mcpserver.exceptions import ToolError
from mcp_types import CallToolResult, TextContent
from pydantic import Field, ValidationError

from demo import results
from demo.asking import Asker, AskError, Piece

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from pydantic import BaseModel

# A stream of some hundred tokens a second would be as many notifications, each with all of the text.
TELL_SECONDS = 0.1

Ctx = Context[Asker, Any]

Prompt = Annotated[str, Field(min_length=1, description="What to say to the model")]
System = Annotated[str | None, Field(description="A system prompt")]
MaxTokens = Annotated[
    int | None,
    Field(ge=1, description="At most so many tokens; as many as fit where none is given"),
]


async def ask_gemma_rust(
    ctx: Ctx, prompt: Prompt, system: System = None, max_tokens: MaxTokens = None
) -> Annotated[CallToolResult, results.Answer]:
    """Ask Gemma 4, whose forward pass is Rust, and return its whole answer with the engine's own timings. Greedy: the same question has the same answer. Cancelling stops the server."""
    asker = _asker(ctx)
    with _told():
        device = await _device(asker)
        piece, seconds = await asker.chat(_body(prompt, system, max_tokens))
        return _answer(_result(piece.text, piece, device, seconds))


async def stream_gemma_rust(
    ctx: Ctx, prompt: Prompt, system: System = None, max_tokens: MaxTokens = None
) -> Annotated[CallToolResult, results.Answer]:
    """The same, streamed: progress notifications carry the text so far, several a second. Cancelling stops the server."""
    asker, text, end = _asker(ctx), "", Piece()
    first: float | None = None
    pieces, told_at, told = 0, float("-inf"), 0
    with _told(lambda: text):
        device = await _device(asker)
        begun = time.perf_counter()
        async with contextlib.aclosing(asker.stream(_body(prompt, system, max_tokens))) as stream:
            async for piece in stream:
                end = _joined(end, piece)
                if not piece.text:
                    continue
                now = time.perf_counter()
                first = now - begun if first is None else first
                text, pieces = text + piece.text, pieces + 1
                if now - told_at >= TELL_SECONDS:
                    told_at, told = now, pieces
                    await ctx.report_progress(pieces, None, text)
        seconds = time.perf_counter() - begun
        if told < pieces:
            await ctx.report_progress(pieces, None, text)
        result = _result(text, end, device, seconds)
        return _answer(result.model_copy(update={"first_text_seconds": first, "pieces": pieces}))


async def engine_info(ctx: Ctx) -> Annotated[CallToolResult, results.Engine]:
    """What the server has loaded and how it is bound: model, device, types, layout of the cache, versions, load and warmup seconds."""
    with _told():
        return _answer(results.Engine.of(await _asker(ctx).object("/v1/engine")))


async def endpoint_status(ctx: Ctx) -> Annotated[CallToolResult, results.Status]:
    """Where the shim on this machine sends requests now, whether the server answers, and where the VM's boot stands. The first thing to ask when something fails."""
    asker = _asker(ctx)
    with _told():
        return _answer(results.Status.of(asker.url, await asker.object("/shim/status")))


async def serving_metrics(ctx: Ctx) -> Annotated[CallToolResult, results.Serving]:
    """What the server has counted since it started: requests, cancelled ones, tokens, who runs and waits, mean times."""
    with _told():
        return _answer(results.Serving.of(await _asker(ctx).text("/metrics")))


def _asker(ctx: Ctx) -> Asker:
    found: Asker = ctx.request_context.lifespan_context
    return found


@contextlib.contextmanager
def _told(text: Callable[[], str] = str) -> Iterator[None]:
    """Faults as errors that the model reads; `text()` is what had come before."""
    try:
        yield
    except AskError as error:
        so_far = text()
        lost = f"\nThe text until then: {so_far}" if so_far else ""
        raise ToolError(f"{error}{lost}") from error
    except (ValidationError, KeyError, ValueError, TypeError) as error:
        raise ToolError(
            f"expected what torchtpu-rs answers, found something else ({type(error).__name__}); endpoint_status says whom the shim asks"
        ) from error


async def _device(asker: Asker) -> str | None:
    try:
        found = (await asker.object("/v1/engine")).get("device")
    except AskError:
        # Another server than ours has no such path; if nobody is there, the question itself says so.
        return None
    return str(found) if found else None


def _body(prompt: str, system: str | None, max_tokens: int | None) -> dict[str, Any]:
    messages = [{"role": "system", "content": system}] if system else []
    body: dict[str, Any] = {"messages": [*messages, {"role": "user", "content": prompt}]}
    return body | ({"max_tokens": max_tokens} if max_tokens else {})


def _joined(end: Piece, piece: Piece) -> Piece:
    return Piece(
        "",
        piece.model or end.model,
        piece.finish or end.finish,
        piece.usage or end.usage,
        piece.timings or end.timings,
    )


def _result(text: str, end: Piece, device: str | None, seconds: float) -> results.Answer:
    usage, timings = end.usage or {}, end.timings or {}
    read = timings.get("prompt_ms")
    return results.Answer(
        text=text,
        model=end.model or "",
        finish=end.finish,
        prompt_tokens=usage.get("prompt_tokens"),
        completion_tokens=usage.get("completion_tokens"),
        prompt_seconds=read / 1000 if read is not None else None,
        tokens_per_second=timings.get("predicted_per_second"),
        device=device,
        round_trip_seconds=seconds,
    )


def _answer(result: BaseModel) -> CallToolResult:
    content = TextContent(type="text", text=str(result))
    return CallToolResult(content=[content], structured_content=result.model_dump(mode="json"))
