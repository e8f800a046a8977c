"""A chat as a client would send it: OpenAI-shaped messages and the tools offered with them.

Knows the shape of messages only. What is said in them is drawn in `corpus`.
"""

import random
from dataclasses import dataclass, field
from typing import Any


@dataclass
class Chat:
    """One conversation as a client would send it, and the category of its last answer."""

    category: str
    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] = field(default_factory=list)
    thinking: bool = False
    last_span: int = -1
    """Which of the model's spans in the last turn is judged: 0 the tool call, -1 the closing answer."""


@dataclass
class Exchange:
    """A question, its answer and what the model would think before it."""

    category: str
    user: str
    answer: str
    thought: str
    calls: list[dict[str, Any]] = field(default_factory=list)
    results: list[str | dict[str, Any]] = field(default_factory=list)


def dialogue(rng: random.Random, exchange: Exchange) -> list[dict[str, Any]]:
    """Returns an exchange as OpenAI-shaped messages; results of several calls come back in any order."""
    asked: dict[str, Any] = {"role": "user", "content": exchange.user}
    answered: dict[str, Any] = {"role": "assistant", "content": exchange.answer}
    if not exchange.calls:
        return [asked, answered]
    called = {"role": "assistant", "content": None, "tool_calls": exchange.calls}
    results: list[dict[str, Any]] = [
        {"role": "tool", "tool_call_id": call["id"], "content": content}
        for call, content in zip(exchange.calls, exchange.results, strict=True)
    ]
    rng.shuffle(results)
    return [asked, called, *results, answered]
