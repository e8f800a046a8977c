"""From a validated request to token ids the engine may run: prompts, limits, stop ids.

Everything that can be refused is refused here, before the queue: ids outside the vocabulary, prompts that do not fit,
messages the template cannot render. Knows no HTTP and no engine, only its facts.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from server.chat import ChatError
from server.errors import context_length_exceeded, invalid

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from server.chat import ChatTemplate, RenderedPrompt
    from server.protocol import ChatRequest, CompletionRequest, Generation
    from server.tokenizer import Tokenizer

DEFAULT_COMPLETION_TOKENS = 16
# Encoding this many characters takes milliseconds; more would hold up every stream of the event loop.
INLINE_CHARACTERS = 50_000

# vLLM and mistral.rs answer 400 too; llama.cpp takes ChatML, whose markers a Gemma has never seen.
NO_TEMPLATE = (
    "this model has no chat template, so it takes no conversations; send a text to /v1/completions, or serve an "
    "instruction-tuned model"
)

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class TextSide:
    """What turns messages into ids and ids into text."""

    tokenizer: Tokenizer
    template: ChatTemplate | None
    """None for a base model, which continues texts and knows no conversation."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Facts of the engine that requests are checked against."""

    context: int
    vocab_size: int
    eos_token_ids: tuple[int, ...]

    @classmethod
    def from_info(cls, info: Mapping[str, Any]) -> Limits:
        """Read them from `Engine.info()`."""
        return cls(
            context=info["layout"]["context"],
            vocab_size=info["vocab_size"],
            eos_token_ids=tuple(info["eos_token_ids"]),
        )


@dataclass(frozen=True, slots=True)
class Prompt:
    """One choice to make: the ids to continue, and by how many at most (0: not at all)."""

    token_ids: list[int]
    max_new: int


@dataclass(frozen=True, slots=True)
class Admission:
    """An admitted request: all the engine and the answer need of it."""

    prompts: tuple[Prompt, ...]
    stop_ids: list[int] | None
    stop_strings: tuple[str, ...]
    stream: bool
    include_usage: bool
    is_chat: bool = False
    calls_tools: bool = False
    """Tools were declared and may be called."""
    one_call: bool = False
    """`parallel_tool_calls: false`."""

    @property
    def prompt_tokens(self) -> int:
        """Prompt tokens of all choices."""
        return sum(len(prompt.token_ids) for prompt in self.prompts)


async def admit_chat(
    request: ChatRequest, text: TextSide, limits: Limits, *, characters: int
) -> Admission:
    """A chat request as ids; `characters` is a bound on how much text there is.

    Raises:
        ApiError: 400, naming the field.
    """
    rendered = await run_bounded(characters, lambda: render_chat(request, text))
    asked = request.max_completion_tokens or request.max_tokens
    prompt = _fit(rendered.token_ids, asked, None, limits, "messages")
    return Admission(
        prompts=(prompt,),
        stop_ids=_stop_ids(request, limits),
        stop_strings=tuple(request.stop),
        stream=bool(request.stream),
        include_usage=request.include_usage,
        is_chat=True,
        calls_tools=bool(_offered_tools(request)),
        one_call=request.parallel_tool_calls is False,
    )


async def admit_completion(
    request: CompletionRequest, text: TextSide, limits: Limits, *, characters: int
) -> Admission:
    """A completion request as ids, one prompt a choice. A text prompt gets <bos> unless it begins with one.

    Raises:
        ApiError: 400, naming the field.
    """
    special = request.add_special_tokens is not False

    def encode() -> list[list[int]]:
        return [
            encode_raw(prompt, text.tokenizer, add_bos=special)
            if isinstance(prompt, str)
            else prompt
            for prompt in request.prompt
        ]

    prompts = await run_bounded(characters, encode)
    for token_ids in prompts:
        check_token_ids(token_ids, limits, "prompt")
    return Admission(
        prompts=tuple(
            _fit(ids, request.max_tokens, DEFAULT_COMPLETION_TOKENS, limits, "prompt")
            for ids in prompts
        ),
        stop_ids=_stop_ids(request, limits),
        stop_strings=tuple(request.stop),
        stream=bool(request.stream),
        include_usage=request.include_usage,
    )


def render_chat(request: ChatRequest, text: TextSide) -> RenderedPrompt:
    """The exact prompt of a chat request.

    Raises:
        ApiError: 400 with the path the template or the conversation's rules object to.
    """
    if text.template is None:
        raise invalid(f"messages: {NO_TEMPLATE}", "messages")
    continues = bool(request.continue_final_message)
    prompted = request.add_generation_prompt
    try:
        return text.template.render(
            request.messages,
            tools=_offered_tools(request),
            add_generation_prompt=not continues if prompted is None else prompted,
            continue_final_message=continues,
        )
    except ChatError as error:
        raise invalid(f"{error.param}: {error}", error.param) from None


def encode_raw(text: str, tokenizer: Tokenizer, *, add_bos: bool) -> list[int]:
    """A raw prompt, where typed markers are markers; with `add_bos` exactly one <bos> in front."""
    token_ids = tokenizer.encode_prompt(text)
    if (
        add_bos
        and tokenizer.adds_bos
        and tokenizer.bos_id is not None
        and token_ids[:1] != [tokenizer.bos_id]
    ):
        return [tokenizer.bos_id, *token_ids]
    return token_ids


def check_token_ids(token_ids: Iterable[int], limits: Limits, param: str) -> None:
    """Refuse ids the model has no row for.

    Raises:
        ApiError: 400 naming `param` and the id.
    """
    for token_id in token_ids:
        if not 0 <= token_id < limits.vocab_size:
            raise invalid(
                f"{param}: token id {token_id} is outside the vocabulary of {limits.vocab_size} tokens",
                param,
            )


async def run_bounded(characters: int, work: Callable[[], T]) -> T:
    """Run `work` here if the text is short, else beside the event loop, which has streams to serve."""
    return work() if characters <= INLINE_CHARACTERS else await asyncio.to_thread(work)


def _offered_tools(request: ChatRequest) -> list[dict[str, Any]]:
    """The tools the prompt declares: none when they may not be called."""
    if not request.tools or request.tool_choice == "none":
        return []
    return [tool.model_dump(exclude_unset=True) for tool in request.tools]


def _fit(
    token_ids: list[int], asked: int | None, default: int | None, limits: Limits, param: str
) -> Prompt:
    """An explicit limit must fit; without one the answer gets what is left, at most `default`."""
    if not token_ids:
        raise invalid(f"{param}: the prompt is empty", param)
    room = limits.context - len(token_ids)
    if asked is None:
        too_long = room < 1
        max_new = room if default is None else min(room, default)
    else:
        too_long = room < asked
        max_new = asked
    if too_long:
        raise context_length_exceeded(
            param,
            prompt_tokens=len(token_ids),
            # A number of 4,300 digits is legal JSON, but not printable.
            max_tokens=1 if asked is None else min(asked, 2**63),
            context=limits.context,
        )
    return Prompt(token_ids, max_new)


def _stop_ids(request: Generation, limits: Limits) -> list[int] | None:
    extra = request.stop_token_ids or []
    check_token_ids(extra, limits, "stop_token_ids")
    if request.ignore_eos:
        return extra
    return [*limits.eos_token_ids, *extra] if extra else None
