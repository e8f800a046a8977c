"""Which request fields are not honoured yet, and which values of them change nothing.

A field that would change the meaning of an answer is refused by name, never ignored; one that is unknown and harmless
is accepted and logged once. The table is the documentation. Knows no tokens and no engine.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from server.errors import clip, invalid, unsupported

if TYPE_CHECKING:
    from collections.abc import Mapping

    from server.protocol import ChatRequest, Generation

logger = logging.getLogger(__name__)

GREEDY = "decoding is greedy; send 0 or leave it out"
NO_PENALTY = "decoding is greedy and unpenalized; leave it out"
NO_CONSTRAINT = "answers are not constrained; ask for the format in the prompt"
NO_LOGPROBS = "log probabilities are not returned; leave it out"
NO_THINKING = "thinking is off in this version"
NO_MEDIA = "this server reads and writes text only"


@dataclass(frozen=True, slots=True)
class Rule:
    """A field that is refused unless its value is one of `harmless` (null always is)."""

    hint: str
    harmless: tuple[object, ...] = ()

    def allows(self, value: object) -> bool:
        """The value changes nothing. 0 and false are different values here, 0 and 0.0 are not."""
        return value is None or any(
            value == same and isinstance(value, bool) == isinstance(same, bool)
            for same in self.harmless
        )


REFUSED: dict[str, Rule] = {
    "temperature": Rule(GREEDY, (0,)),
    "n": Rule("one choice a request; greedy choices would be equal", (1,)),
    "best_of": Rule("one candidate a request", (1,)),
    "use_beam_search": Rule("decoding is greedy", (False,)),
    "frequency_penalty": Rule(NO_PENALTY, (0,)),
    "presence_penalty": Rule(NO_PENALTY, (0,)),
    "repetition_penalty": Rule(NO_PENALTY, (1,)),
    "repeat_penalty": Rule(NO_PENALTY, (1,)),
    "dry_multiplier": Rule(NO_PENALTY, (0,)),
    "mirostat": Rule("decoding is greedy", (0,)),
    "logit_bias": Rule("no token's score is changed; leave it out", ({},)),
    "bad_words": Rule("no word is banned; leave it out", ([],)),
    "allowed_token_ids": Rule("no token is banned; leave it out"),
    "min_tokens": Rule("a turn ends where the model ends it", (0,)),
    "logprobs": Rule(NO_LOGPROBS, (False,)),
    "top_logprobs": Rule(NO_LOGPROBS, (0,)),
    "prompt_logprobs": Rule(NO_LOGPROBS, (False,)),
    "n_probs": Rule(NO_LOGPROBS, (0,)),
    "response_format": Rule(
        'write {"type": "text"} or leave it out; ' + NO_CONSTRAINT, ({"type": "text"},)
    ),
    "structured_outputs": Rule(NO_CONSTRAINT),
    "guided_json": Rule(NO_CONSTRAINT),
    "guided_regex": Rule(NO_CONSTRAINT),
    "guided_choice": Rule(NO_CONSTRAINT),
    "guided_grammar": Rule(NO_CONSTRAINT),
    "json_schema": Rule(NO_CONSTRAINT, ({},)),
    "grammar": Rule(NO_CONSTRAINT, ("",)),
    "reasoning_effort": Rule(NO_THINKING, ("none",)),
    "reasoning": Rule(NO_THINKING, ({"effort": "none"}, {"enabled": False})),
    "enable_thinking": Rule(NO_THINKING, (False,)),
    "thinking": Rule(NO_THINKING, (False, {"type": "disabled"})),
    "think": Rule(NO_THINKING, (False,)),
    "audio": Rule(NO_MEDIA),
    "modalities": Rule(NO_MEDIA, (["text"], [])),
    "web_search_options": Rule("there is no web search"),
    "functions": Rule("write tools instead", ([],)),
    "function_call": Rule("write tool_choice instead", ("none", "auto")),
    "verbosity": Rule("say in the prompt how long the answer should be", ("medium",)),
    "store": Rule("nothing is kept after the answer", (False,)),
    "chat_template": Rule("the checkpoint's own template is used"),
    "documents": Rule("put documents into a message", ([],)),
    "echo": Rule("the prompt is not repeated", (False,)),
    "suffix": Rule("text is only continued, not filled in", ("",)),
    "truncate_prompt_tokens": Rule("a prompt is never cut; send one that fits"),
    "skip_special_tokens": Rule("control tokens are never shown", (True,)),
    "include_stop_str_in_output": Rule("stop strings are never shown", (False,)),
    "return_token_ids": Rule("use /tokenize or /v1/chat/completions/render", (False,)),
    "n_predict": Rule("write max_tokens instead"),
    "max_new_tokens": Rule("write max_tokens instead"),
    "max_output_tokens": Rule("write max_tokens instead"),
}

# Known, and without any effect on the text of a greedy answer.
ACCEPTED = frozenset(
    {
        "user",
        "metadata",
        "service_tier",
        "safety_identifier",
        "prompt_cache_key",
        "prompt_cache_retention",
        "cache_prompt",
        "cache_salt",
        "priority",
        "request_id",
        "prediction",
        "typical_p",
        "top_a",
        "tfs_z",
        "length_penalty",
        "add_special_tokens",
        "include_reasoning",
        "spaces_between_special_tokens",
        "return_tokens_as_token_ids",
        "timings_per_token",
        "chat_template_kwargs",
    }
)

# Bounds what a client can make the log remember.
MAX_LOGGED_NAMES = 200


def refuse_unsupported(request: Generation, body: Mapping[str, Any]) -> None:
    """Check every field of `body` that is not honoured.

    Raises:
        ApiError: 400 naming the field.
    """
    for name in REFUSED.keys() & body.keys():
        value = body[name]
        if not REFUSED[name].allows(value):
            raise unsupported(name, _hint(name, value))
    if request.stream_options is not None:
        if not request.stream:
            raise invalid("stream_options is only allowed with stream: true", "stream_options")
        if (request.stream_options.model_extra or {}).get("continuous_usage_stats"):
            raise unsupported(
                "stream_options.continuous_usage_stats", "use include_usage for one usage chunk"
            )


def refuse_unsupported_chat(request: ChatRequest, body: Mapping[str, Any]) -> None:
    """The same for what only chat has.

    Raises:
        ApiError: 400 naming the field.
    """
    refuse_unsupported(request, body)
    if body.get("add_special_tokens"):
        raise unsupported("add_special_tokens", "the template already writes <bos>")
    _check_template_variables(body.get("chat_template_kwargs"))
    _check_tool_choice(request)
    if request.continue_final_message and request.add_generation_prompt:
        raise invalid(
            "continue_final_message and add_generation_prompt exclude each other",
            "continue_final_message",
        )


def _hint(name: str, value: object) -> str:
    hint = REFUSED[name].hint
    if name == "logit_bias" and isinstance(value, dict):
        return f"{hint} (it names token {clip(str(next(iter(value))), 40)})"
    return hint


def _check_template_variables(variables: object) -> None:
    if variables is None:
        return
    if not isinstance(variables, dict):
        raise invalid("chat_template_kwargs must be an object", "chat_template_kwargs")
    for name, value in variables.items():
        if name == "enable_thinking" and value in (None, False):
            continue
        hint = NO_THINKING if name == "enable_thinking" else "the template takes no such variable"
        raise unsupported(f"chat_template_kwargs.{name}", hint)


def _check_tool_choice(request: ChatRequest) -> None:
    choice = request.tool_choice
    if choice is None or choice == "none":
        return
    if not request.tools:
        if choice == "auto":
            return
        raise invalid("tool_choice is only allowed with tools", "tool_choice")
    if choice in ("auto", {"type": "auto"}):
        return
    if choice == "required":
        raise unsupported("tool_choice", "a call cannot be forced; write auto or none")
    name = _named_choice(choice)
    if name is None:
        raise invalid("tool_choice must be auto or none", "tool_choice")
    if name not in {tool.function.name for tool in request.tools}:
        raise invalid(f"tool_choice names {clip(name, 80)!r}, which is not in tools", "tool_choice")
    raise unsupported("tool_choice", "a call cannot be forced; write auto or none")


def _named_choice(choice: object) -> str | None:
    if isinstance(choice, dict) and isinstance(choice.get("function"), dict):
        name = choice["function"].get("name")
        return name if isinstance(name, str) else None
    return None


class UnknownFields:
    """Names the unknown fields of requests in the log, each once."""

    def __init__(self) -> None:
        self._seen: set[str] = set()

    def note(self, request: Generation) -> None:
        """Log the unknown names `request` has that no request had before."""
        names = set(request.model_extra or {}) - REFUSED.keys() - ACCEPTED
        new = sorted({clip(name, 60) for name in names} - self._seen)
        if new and len(self._seen) < MAX_LOGGED_NAMES:
            self._seen.update(new)
            logger.info("accepted without effect: unknown request fields %s", new)
