"""Every answer's JSON: chunks and frames for a stream, and the whole answer as a fold of the same deltas.

`ChatWire` and `CompletionWire` are the two shapes. Knows deltas and totals; knows no engine, no queue, no socket.
"""

from __future__ import annotations

import json
import time
import uuid
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from server.tools import ContentDelta, ReasoningDelta, ToolCallDelta

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from server.answer import Delta, FinishReason, Totals
    from server.errors import ApiError

SYSTEM_FINGERPRINT = "torchtpu_rs-greedy"

DONE = b"data: [DONE]\n\n"
PING = b": ping\n\n"


def frame(payload: dict[str, Any]) -> bytes:
    """One server-sent event. The single space after `data:` is part of the contract: clients split on it."""
    text = json.dumps(payload, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return f"data: {text}\n\n".encode()


def error_frame(error: ApiError) -> bytes:
    """The frame that ends a broken stream, before `DONE`: without it a client takes the silence for success."""
    return frame(error.body())


def usage_of(totals: Totals) -> dict[str, Any]:
    """OpenAI's `usage`."""
    return {
        "prompt_tokens": totals.prompt_tokens,
        "completion_tokens": totals.completion_tokens,
        "total_tokens": totals.prompt_tokens + totals.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": 0},
        "completion_tokens_details": {"reasoning_tokens": totals.reasoning_tokens},
    }


def timings_of(totals: Totals) -> dict[str, Any]:
    """llama.cpp's `timings`, and how long the request queued."""
    return {
        "queue_ms": _milliseconds(totals.queue_seconds),
        "prompt_n": totals.prompt_tokens,
        "prompt_ms": _milliseconds(totals.prefill_seconds),
        "prompt_per_second": _rate(totals.prompt_tokens, totals.prefill_seconds),
        "predicted_n": totals.completion_tokens,
        "predicted_ms": _milliseconds(totals.decode_seconds),
        # The first token of a choice comes out of its prompt; decoding makes the others.
        "predicted_per_second": _rate(totals.decoded_tokens, totals.decode_seconds),
    }


@dataclass(slots=True)
class Fold:
    """The deltas of one choice, put together."""

    text: list[str] = field(default_factory=list)
    reasoning: list[str] = field(default_factory=list)
    calls: dict[int, dict[str, Any]] = field(default_factory=dict)
    finish_reason: FinishReason | None = None

    def add(self, deltas: Iterable[Delta]) -> None:
        """Append what the deltas say."""
        for delta in deltas:
            match delta:
                case ContentDelta():
                    self.text.append(delta.text)
                case ReasoningDelta():
                    self.reasoning.append(delta.text)
                case ToolCallDelta():
                    call = self.calls.setdefault(delta.index, _new_call(delta))
                    call["function"]["arguments"] += delta.arguments


class Wire(Protocol):
    """The JSON of one answer: what the two endpoints differ in."""

    id: str

    def opening(self, index: int) -> list[dict[str, Any]]:
        """Chunks before a choice's first delta."""

    def chunks(self, index: int, deltas: Sequence[Delta]) -> list[dict[str, Any]]:
        """Chunks that carry deltas."""

    def closing(self, index: int, reason: FinishReason, last: Totals | None) -> dict[str, Any]:
        """The one chunk of a choice with a finish reason; `last` adds the timings of the answer."""

    def usage(self, totals: Totals) -> dict[str, Any]:
        """The chunk with usage and no choices."""

    def whole(self, choices: Sequence[Fold], totals: Totals) -> dict[str, Any]:
        """The answer that is not streamed."""


class _Shape:
    """What both shapes share: identity, and where usage and timings stand."""

    chunk_object: str
    whole_object: str

    def __init__(self, prefix: str, model: str, *, include_usage: bool = False) -> None:
        self.id = f"{prefix}-{uuid.uuid4().hex}"
        self._created = int(time.time())
        self._model = model
        self._include_usage = include_usage

    def usage(self, totals: Totals) -> dict[str, Any]:
        """The chunk with usage and no choices."""
        return {
            **self._head(self.chunk_object),
            "choices": [],
            "usage": usage_of(totals),
            "timings": timings_of(totals),
        }

    def _head(self, name: str) -> dict[str, Any]:
        return {
            "id": self.id,
            "object": name,
            "created": self._created,
            "model": self._model,
            "system_fingerprint": SYSTEM_FINGERPRINT,
        }

    def _chunk(self, choice: dict[str, Any], last: Totals | None = None) -> dict[str, Any]:
        chunk = {**self._head(self.chunk_object), "choices": [choice]}
        if self._include_usage:
            chunk["usage"] = None
        elif last is not None:
            chunk["timings"] = timings_of(last)
        return chunk

    def _whole(self, choices: list[dict[str, Any]], totals: Totals) -> dict[str, Any]:
        return {
            **self._head(self.whole_object),
            "choices": choices,
            "usage": usage_of(totals),
            "timings": timings_of(totals),
        }


class ChatWire(_Shape):
    """`chat.completion` and its chunks."""

    chunk_object = "chat.completion.chunk"
    whole_object = "chat.completion"

    def __init__(self, model: str, *, include_usage: bool = False) -> None:
        super().__init__("chatcmpl", model, include_usage=include_usage)

    def opening(self, index: int) -> list[dict[str, Any]]:
        """The role comes first, with empty content."""
        return [self._delta(index, {"role": "assistant", "content": ""})]

    def chunks(self, index: int, deltas: Sequence[Delta]) -> list[dict[str, Any]]:
        """A chunk for each run of deltas of one kind."""
        chunks = []
        for kind, text in _merged(deltas):
            if isinstance(kind, ToolCallDelta):
                chunks.append(self._delta(index, {"tool_calls": [_call_delta(kind)]}))
            else:
                chunks.append(self._delta(index, {kind: text}))
        return chunks

    def closing(self, index: int, reason: FinishReason, last: Totals | None) -> dict[str, Any]:
        """An empty delta and the reason."""
        return self._delta(index, {}, reason, last)

    def whole(self, choices: Sequence[Fold], totals: Totals) -> dict[str, Any]:
        """Messages instead of deltas."""
        return self._whole(
            [
                {
                    "index": index,
                    "message": _message(fold),
                    "logprobs": None,
                    "finish_reason": fold.finish_reason,
                }
                for index, fold in enumerate(choices)
            ],
            totals,
        )

    def _delta(
        self,
        index: int,
        delta: dict[str, Any],
        reason: FinishReason | None = None,
        last: Totals | None = None,
    ) -> dict[str, Any]:
        return self._chunk(
            {"index": index, "delta": delta, "logprobs": None, "finish_reason": reason}, last
        )


class CompletionWire(_Shape):
    """`text_completion`, streamed or not."""

    chunk_object = "text_completion"
    whole_object = "text_completion"

    def __init__(self, model: str, *, include_usage: bool = False) -> None:
        super().__init__("cmpl", model, include_usage=include_usage)

    def opening(self, index: int) -> list[dict[str, Any]]:
        """Nothing: text comes at once."""
        return []

    def chunks(self, index: int, deltas: Sequence[Delta]) -> list[dict[str, Any]]:
        """One chunk with the text."""
        text = "".join(delta.text for delta in deltas if isinstance(delta, ContentDelta))
        return [self._chunk(_text_choice(index, text))] if text else []

    def closing(self, index: int, reason: FinishReason, last: Totals | None) -> dict[str, Any]:
        """Empty text and the reason."""
        return self._chunk(_text_choice(index, "", reason), last)

    def whole(self, choices: Sequence[Fold], totals: Totals) -> dict[str, Any]:
        """All texts at once."""
        return self._whole(
            [
                _text_choice(index, "".join(fold.text), fold.finish_reason)
                for index, fold in enumerate(choices)
            ],
            totals,
        )


def _merged(deltas: Sequence[Delta]) -> list[tuple[ToolCallDelta | str, str]]:
    """Neighbouring text deltas of one kind as one; a tool call delta stays alone."""
    merged: list[tuple[ToolCallDelta | str, str]] = []
    for delta in deltas:
        if isinstance(delta, ToolCallDelta):
            merged.append((delta, ""))
            continue
        key = "content" if isinstance(delta, ContentDelta) else "reasoning_content"
        if merged and merged[-1][0] == key:
            merged[-1] = (key, merged[-1][1] + delta.text)
        else:
            merged.append((key, delta.text))
    return merged


def _new_call(delta: ToolCallDelta) -> dict[str, Any]:
    return {
        "id": delta.id,
        "type": "function",
        "function": {"name": delta.name, "arguments": ""},
    }


def _call_delta(delta: ToolCallDelta) -> dict[str, Any]:
    """The first delta of a call names it; later ones carry only pieces of the arguments."""
    if delta.id is None:
        return {"index": delta.index, "function": {"arguments": delta.arguments}}
    call = _new_call(delta)
    call["function"]["arguments"] = delta.arguments
    return {"index": delta.index, **call}


def _message(fold: Fold) -> dict[str, Any]:
    text = "".join(fold.text)
    message: dict[str, Any] = {
        "role": "assistant",
        "content": None if fold.calls and not text else text,
        "refusal": None,
    }
    if fold.reasoning:
        message["reasoning_content"] = "".join(fold.reasoning)
    if fold.calls:
        message["tool_calls"] = [fold.calls[index] for index in sorted(fold.calls)]
    return message


def _text_choice(index: int, text: str, reason: FinishReason | None = None) -> dict[str, Any]:
    return {"index": index, "text": text, "logprobs": None, "finish_reason": reason}


def _milliseconds(seconds: float) -> float:
    return round(seconds * 1000, 3)


def _rate(count: int, seconds: float) -> float:
    return round(count / seconds, 3) if seconds > 0 else 0.0
