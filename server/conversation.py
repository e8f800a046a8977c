"""A client's conversation, checked and brought into the form that chat templates read.

Owns what a conversation may look like: roles, text parts, tool calls with their arguments as mappings, results matched
to calls by id, and a bound on nesting. Knows no template, no tokenizer and no HTTP; `param` in its errors is
the path of the faulty field in the request.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, NoReturn

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

ROLES: Final = ("system", "developer", "user", "assistant", "tool")
MAX_DEPTH: Final = 32  # templates print nested values by recursion, some six Python frames a level


class ChatError(ValueError):
    """The client's messages, tools or variables cannot become a prompt; `param` is the path of the faulty field."""

    def __init__(self, param: str, message: str) -> None:
        super().__init__(message)
        self.param: Final = param[:200]  # a path may hold keys that the client chose


def prepare_messages(
    messages: Sequence[Any], roles_with_parts: frozenset[str]
) -> list[dict[str, Any]]:
    """Return the messages as templates read them; text parts stay parts for `roles_with_parts` and are joined else.

    Raises:
        ChatError: a message is malformed, or a tool result answers no call.
    """
    if not messages:
        raise ChatError("messages", "expected at least one message, found none")
    called: dict[str, str] = {}
    prepared = []
    for index, message in enumerate(messages):
        path = f"messages[{index}]"
        if not isinstance(message, Mapping) or message.get("role") not in ROLES:
            found = message.get("role") if isinstance(message, Mapping) else message
            _refuse(f"{path}.role", f"one of {', '.join(ROLES)}", found)
        prepared.append(_message(message, path, called, roles_with_parts))
    return prepared


def prepare_tools(tools: Sequence[Any]) -> list[dict[str, Any]] | None:
    """Return the tools without fields that are null, which templates would print, and None for no tools.

    Raises:
        ChatError: a tool is not of the form `{"type": "function", "function": {"name": …}}`.
    """
    prepared = []
    for index, tool in enumerate(tools):
        function = tool.get("function") if isinstance(tool, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            _refuse(f"tools[{index}].function.name", "a function with a name", function)
        prepared.append({**tool, "function": _without_null(function)})
    return prepared or None


def fold_tool_results(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Move each run of tool messages into `tool_responses` of the message before, the form that old templates know."""
    folded: list[dict[str, Any]] = []
    for message in messages:
        if message["role"] != "tool" or not folded:
            folded.append(dict(message))
            continue
        result = {"name": message["name"], "response": message.get("content", "")}
        folded[-1].setdefault("tool_responses", []).append(result)
    return folded


def texts(value: Any, path: str, depth: int = 0) -> Iterator[str]:
    """Yield every string in a JSON value, keys included.

    Raises:
        ChatError: the value is nested too deeply, or a string holds half of a surrogate pair.
    """
    if depth > MAX_DEPTH:
        raise ChatError(path, f"expected at most {MAX_DEPTH} levels of nesting, found more")
    if isinstance(value, str):
        try:
            value.encode()
        except UnicodeEncodeError:
            raise ChatError(
                path, "expected whole characters, found half of a surrogate pair"
            ) from None
        yield value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from texts(key, path, depth)
            yield from texts(item, f"{path}.{key}", depth + 1)
    elif isinstance(value, Sequence):
        for index, item in enumerate(value):
            yield from texts(item, f"{path}[{index}]", depth + 1)


def map_texts(value: Any, change: Callable[[str], str]) -> Any:
    """Return a copy of a JSON value with every string in it changed, keys included."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, Mapping):
        return {change(key): map_texts(item, change) for key, item in value.items()}
    if isinstance(value, Sequence):
        return [map_texts(item, change) for item in value]
    return value


def _message(
    message: Mapping[str, Any], path: str, called: dict[str, str], roles_with_parts: frozenset[str]
) -> dict[str, Any]:
    # Without its nulls, since templates print them as None.
    plain = _without_null(message)
    role = plain["role"]
    if "content" in plain:
        plain["content"] = _content(plain["content"], f"{path}.content", role in roles_with_parts)
    calls = plain.pop("tool_calls", None)
    if calls:
        plain["tool_calls"] = _tool_calls(calls, f"{path}.tool_calls", called)
    if role == "tool":
        call_id = plain.get("tool_call_id")
        if not isinstance(call_id, str) or call_id not in called:
            _refuse(f"{path}.tool_call_id", "the id of a tool call in a message before", call_id)
        plain = {"content": "", **plain, "name": called[call_id]}
    # As transformers does: reasoning has three names, and a template may read the first or the last.
    names = ("reasoning_content", "thinking", "reasoning")
    reasoning = next((plain[name] for name in names if name in plain), None)
    return plain if reasoning is None else {"thinking": reasoning, **plain, names[0]: reasoning}


def _content(content: Any, path: str, keep_parts: bool) -> str | list[dict[str, Any]]:
    if isinstance(content, str):
        return content
    if not isinstance(content, Sequence):
        _refuse(path, "text or a list of text parts", content)
    for index, part in enumerate(content):
        if not isinstance(part, Mapping) or part.get("type") != "text":
            found = part.get("type") if isinstance(part, Mapping) else part
            _refuse(f"{path}[{index}].type", "text, the only kind this model takes", found)
        if not isinstance(part.get("text"), str):
            _refuse(f"{path}[{index}].text", "text", part.get("text"))
    return [dict(part) for part in content] if keep_parts else "\n".join(p["text"] for p in content)


def _tool_calls(calls: Any, path: str, called: dict[str, str]) -> list[dict[str, Any]]:
    if not isinstance(calls, Sequence) or isinstance(calls, str):
        _refuse(path, "a list of tool calls", calls)
    prepared = []
    for index, call in enumerate(calls):
        where = f"{path}[{index}].function"
        function = call.get("function") if isinstance(call, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            _refuse(f"{where}.name", "a function with a name", function)
        arguments = _arguments(function.get("arguments"), f"{where}.arguments")
        prepared.append({**call, "function": {**function, "arguments": arguments}})
        if isinstance(call.get("id"), str):
            called[call["id"]] = function["name"]
    return prepared


def _arguments(arguments: Any, path: str) -> dict[str, Any]:
    """Parse a call's arguments, which the wire carries as JSON text and templates read as a mapping."""
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments, parse_constant=_refuse_constant) if arguments else {}
        except (ValueError, RecursionError):
            _refuse(path, "a JSON object as text", arguments)
    if arguments is None:
        return {}
    if not isinstance(arguments, Mapping):
        _refuse(path, "a JSON object as text", arguments)
    return dict(arguments)


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


def _without_null(fields: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in fields.items() if value is not None}


def _refuse(path: str, expected: str, found: Any) -> NoReturn:
    shown = ascii(found) if isinstance(found, (str, int, float)) else type(found).__name__
    raise ChatError(
        path, f"expected {expected}, found {shown if len(shown) <= 80 else shown[:80] + '…'}"
    )
