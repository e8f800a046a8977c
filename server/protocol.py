"""The wire types of requests: strict shapes, and nothing about what is honoured (`refusals` has that).

A body becomes one frozen model, or an `ApiError` that names the field as a client would write it
(`messages[0].role`). Knows no tokens and no engine.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    StringConstraints,
    ValidationError,
)
from pydantic_core import PydanticCustomError, from_json

from server.errors import ApiError, clip, invalid

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

MAX_STOP_STRINGS = 4
MAX_PROMPTS = 256


def _integral(value: object) -> object:
    """JSON has one number type: 1.0 is 1, and 1.5 stays wrong."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _stop_strings(value: object) -> object:
    """OpenAI's rule: null, a string, or a list of one to four strings, none of them empty; `[]` means null."""
    if value is None:
        return []
    stops = [value] if isinstance(value, str) else value
    if not isinstance(stops, list) or not all(isinstance(stop, str) for stop in stops):
        raise PydanticCustomError("stop", "expected a string or a list of strings")
    if "" in stops:
        raise PydanticCustomError("stop", "a stop string must not be empty")
    if len(stops) > MAX_STOP_STRINGS:
        raise PydanticCustomError("stop", f"at most {MAX_STOP_STRINGS} stop strings are allowed")
    return stops


def _prompts(value: object) -> object:
    """The four shapes of a completions prompt, brought to one: a list of texts or of token id lists."""
    if isinstance(value, str):
        return [value]
    if not isinstance(value, list) or not value:
        raise PydanticCustomError(
            "prompt", "expected a string, a list of strings, a list of token ids or a list of those"
        )
    if all(isinstance(item, str) for item in value):
        prompts = value
    elif all(type(item) is int for item in value):
        prompts = [value]
    elif all(isinstance(item, list) and item for item in value) and all(
        type(token_id) is int for item in value for token_id in item
    ):
        prompts = value
    else:
        raise PydanticCustomError(
            "prompt", "expected only strings, only token ids, or only non-empty lists of token ids"
        )
    if len(prompts) > MAX_PROMPTS:
        raise PydanticCustomError("prompt", f"at most {MAX_PROMPTS} prompts are allowed")
    return prompts


Whole = Annotated[int, BeforeValidator(_integral), Field(strict=True)]
Number = Annotated[float, Field(strict=True, allow_inf_nan=False)]
Flag = Annotated[bool, Field(strict=True)]
Text = Annotated[str, Field(strict=True)]
StopStrings = Annotated[
    list[str], BeforeValidator(_stop_strings, json_schema_input_type=str | list[str] | None)
]
Prompts = Annotated[
    list[str] | list[list[int]],
    BeforeValidator(_prompts, json_schema_input_type=str | list[str] | list[int] | list[list[int]]),
]
# The names OpenAI allows; Gemma's call syntax would also break on others.
ToolName = Annotated[str, StringConstraints(strict=True, pattern=r"^[a-zA-Z0-9_-]{1,64}$")]


class WireModel(BaseModel):
    """Frozen; unknown fields are kept in `model_extra`, so that they can be judged and logged."""

    model_config = ConfigDict(frozen=True, extra="allow")


class StreamOptions(WireModel):
    """`stream_options`."""

    include_usage: Flag | None = None


class FunctionTool(WireModel):
    """`tools[].function`; the parameters schema goes to the template as it is."""

    name: ToolName
    description: Text | None = None
    parameters: dict[str, Any] | None = None


class Tool(WireModel):
    """`tools[]`."""

    type: Literal["function"]
    function: FunctionTool


class Generation(WireModel):
    """What both inference endpoints share."""

    model: Text | None = None
    stream: Flag | None = None
    stream_options: StreamOptions | None = None
    stop: StopStrings = Field(default_factory=list)
    stop_token_ids: Annotated[list[Whole], Field(fail_fast=True)] | None = None
    ignore_eos: Flag | None = None
    seed: Whole | None = None
    n: Annotated[Whole, Field(ge=1, le=128)] | None = None
    temperature: Annotated[Number, Field(ge=0, le=2)] | None = None
    top_p: Annotated[Number, Field(gt=0, le=1)] | None = None
    top_k: Annotated[Whole, Field(ge=-1)] | None = None
    min_p: Annotated[Number, Field(ge=0, le=1)] | None = None
    frequency_penalty: Annotated[Number, Field(ge=-2, le=2)] | None = None
    presence_penalty: Annotated[Number, Field(ge=-2, le=2)] | None = None

    @property
    def include_usage(self) -> bool:
        """A usage chunk was asked for."""
        return self.stream_options is not None and bool(self.stream_options.include_usage)


class ChatRequest(Generation):
    """POST /v1/chat/completions. Messages keep their wire form: `chat` reads them."""

    messages: Annotated[list[dict[str, Any]], Field(min_length=1, fail_fast=True)]
    max_tokens: Annotated[Whole, Field(ge=1)] | None = None
    max_completion_tokens: Annotated[Whole, Field(ge=1)] | None = None
    tools: Annotated[list[Tool], Field(fail_fast=True)] | None = None
    tool_choice: Any = None
    parallel_tool_calls: Flag | None = None
    add_generation_prompt: Flag | None = None
    continue_final_message: Flag | None = None
    logprobs: Flag | None = None
    top_logprobs: Annotated[Whole, Field(ge=0, le=20)] | None = None


class CompletionRequest(Generation):
    """POST /v1/completions. `prompt` is always a list here, one entry a choice."""

    prompt: Prompts
    max_tokens: Annotated[Whole, Field(ge=0)] | None = None
    add_special_tokens: Flag | None = None


class TokenizeRequest(WireModel):
    """POST /tokenize: vLLM's form (`prompt` or `messages`) or llama.cpp's (`content`)."""

    prompt: Text | None = None
    messages: Annotated[list[dict[str, Any]], Field(min_length=1, fail_fast=True)] | None = None
    tools: Annotated[list[Tool], Field(fail_fast=True)] | None = None
    content: Text | None = None
    add_special_tokens: Flag = True
    add_generation_prompt: Flag = True
    return_token_strs: Flag | None = None
    add_special: Flag = False
    parse_special: Flag = True
    with_pieces: Flag = False


class DetokenizeRequest(WireModel):
    """POST /detokenize: the same in vLLM and llama.cpp."""

    tokens: Annotated[list[Whole], Field(fail_fast=True)]


Request = TypeVar("Request", bound=WireModel)


def parse_json(raw: bytes) -> dict[str, Any]:
    """The body as a JSON object.

    Raises:
        ApiError: 400 for anything else: broken UTF-8, NaN, lone surrogates, too deep, too many digits, not an object.
    """
    try:
        body = from_json(raw, allow_inf_nan=False)
    except ValueError as error:
        raise invalid(f"The body is not valid JSON: {error}") from None
    if not isinstance(body, dict):
        raise invalid(f"The body must be a JSON object, found {_describe(body)}")
    return body


def parse_request(kind: type[Request], body: Mapping[str, Any]) -> Request:
    """`body` as a `kind`.

    Raises:
        ApiError: 400 naming the first field that is wrong.
    """
    try:
        return kind.model_validate(body)
    except ValidationError as error:
        raise _first_problem(error) from None


def _first_problem(error: ValidationError) -> ApiError:
    problem = error.errors(include_url=False, include_context=False)[0]
    param = field_path(problem["loc"]) or None
    if problem["type"] == "missing":
        return invalid(f"Missing required parameter: {param}", param)
    reason = problem["msg"].removeprefix("Input ").rstrip(".")
    return invalid(f"Invalid {param}: {reason}, found {_describe(problem['input'])}", param)


def field_path(location: Sequence[int | str]) -> str:
    """`("messages", 0, "role")` as `messages[0].role`."""
    path = ""
    for part in location:
        if isinstance(part, int):
            path += f"[{part}]"
        else:
            path += f".{part}" if path else part
    return path


def _describe(value: object) -> str:
    """A found value, short: containers by kind, scalars by their clipped text."""
    match value:
        case None:
            return "null"
        case bool():
            return str(value).lower()
        case str():
            return f"the string {clip(value, 60)!r}"
        case int() | float():
            return clip(str(value), 60)
        case list():
            return "an empty list" if not value else "a list"
        case dict():
            return "an object"
        case _:
            return type(value).__name__
