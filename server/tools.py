"""A model's reply, id by id, to content, reasoning and tool calls.

Owns Gemma 4's reply format: channels and calls are opened and closed by control tokens, so the machine runs on ids and
text that merely looks like a marker is text. Knows no HTTP, no stop rule and no tool: a call is passed on as written.
"""

from __future__ import annotations

import json
import re
import secrets
from dataclasses import dataclass
from enum import Enum
from itertools import pairwise
from typing import TYPE_CHECKING, Final, TypeAlias

from server.tokenizer import TextStream

if TYPE_CHECKING:
    from collections.abc import Sequence

    from server.tokenizer import Tokenizer

_MAX_DEPTH: Final = 64  # a reply of nothing but brackets must not exhaust the stack
_HEAD: Final = "thought\n"  # the channel's name, which stands on a line of its own
_NAME: Final = re.compile(r"\s*call:\s*([^\s(){}]+)\s*")
_KEY: Final = re.compile(r'[^\s"(){}\[\],:=][^"(){}\[\],:=]*')
_NUMBER: Final = re.compile(r"-?(?:0|[1-9]\d*)(?:\.\d+)?(?:[eE][+-]?\d+)?")
_BARE: Final = re.compile(r'[^\s"(){}\[\],][^"(){}\[\],]*')
_PYTHON_WORDS: Final = {"True": "true", "False": "false", "None": "null"}


@dataclass(frozen=True, slots=True)
class ContentDelta:
    """A piece of the answer."""

    text: str


@dataclass(frozen=True, slots=True)
class ReasoningDelta:
    """A piece of the reasoning before the answer."""

    text: str


@dataclass(frozen=True, slots=True)
class ToolCallDelta:
    """A piece of a tool call: the first of an index has id and name, the pieces of `arguments` join to a JSON object."""

    index: int
    id: str | None
    name: str | None
    arguments: str


Delta: TypeAlias = ContentDelta | ReasoningDelta | ToolCallDelta


class _Section(Enum):
    CONTENT = "content"
    REASONING = "reasoning"
    CALL = "call"


class ReplyParser:
    """Turns the ids of one reply into deltas.

    No control token and no call syntax shows as content. With `parse_tools` off, what the model wrote as a call is
    dropped. With it on, a call that cannot be read, or that the end of the reply cuts off, comes out as content in
    the model's own words without the markers: nothing is lost, and no client runs half a call.

    Every channel counts as reasoning. `reasoning_tokens` counts the ids in channels with both markers.
    """

    def __init__(
        self, tokenizer: Tokenizer, *, parse_tools: bool, in_reasoning: bool = False
    ) -> None:
        """Start a reply; `in_reasoning` says that the prompt ended inside an open channel."""
        self._tokenizer = tokenizer
        self._parse_tools = parse_tools
        self._channel = tokenizer.token_id("<|channel>")
        self._channel_end = tokenizer.token_id("<channel|>")
        self._call = tokenizer.token_id("<|tool_call>")
        self._quote = tokenizer.token_id('<|"|>')
        self._section = _Section.REASONING if in_reasoning else _Section.CONTENT
        self._stream = TextStream(tokenizer)
        self._held = ""  # reasoning that may yet turn out to be the channel's name or the line end before its marker
        self._at_head = in_reasoning
        self._call_ids: list[int] = []
        self.tool_calls = 0
        self.reasoning_tokens = 0

    def push(self, token_id: int) -> list[Delta]:
        """Take the next id and return what it completes."""
        was_reasoning = self._section is _Section.REASONING
        if token_id in self._tokenizer.control_ids:
            deltas = self._push_control(token_id)
        elif self._section is _Section.CALL:
            self._call_ids.append(token_id)
            deltas = []
        else:
            deltas = self._text(self._stream.push(token_id))
        self.reasoning_tokens += was_reasoning or self._section is _Section.REASONING
        return deltas

    def finish(self) -> list[Delta]:
        """Return what the end of the reply completes."""
        return self._leave(is_closed=False)

    def _push_control(self, token_id: int) -> list[Delta]:
        if self._section is _Section.CALL and token_id == self._quote:
            self._call_ids.append(token_id)
            return []
        if token_id == self._channel:
            return self._enter(_Section.REASONING)
        if token_id == self._call:
            return self._enter(_Section.CALL)
        if self._section is _Section.CALL:  # any other marker ends a call, its own or the turn's
            return self._enter(_Section.CONTENT)
        if token_id == self._channel_end and self._section is _Section.REASONING:
            return self._enter(_Section.CONTENT)
        return []

    def _enter(self, section: _Section) -> list[Delta]:
        deltas = self._leave(is_closed=True)
        self._section = section
        self._at_head = section is _Section.REASONING
        return deltas

    def _leave(self, *, is_closed: bool) -> list[Delta]:
        """Finish the section: its last characters, or its call."""
        if self._section is _Section.CALL:
            token_ids, self._call_ids = self._call_ids, []
            return self._calls(token_ids) if self._parse_tools else []
        deltas = self._text(self._stream.finish())
        self._stream = TextStream(self._tokenizer)
        held, self._held = self._held, ""
        is_line_end = is_closed and held == "\n"
        is_name = self._at_head and held == _HEAD.rstrip()
        return deltas if is_line_end or is_name or not held else [*deltas, ReasoningDelta(held)]

    def _text(self, text: str) -> list[Delta]:
        if self._section is _Section.CONTENT:
            return [ContentDelta(text)] if text else []
        text = self._held + text
        if self._at_head:
            if _HEAD.startswith(text):
                self._at_head = text != _HEAD
                self._held = text if self._at_head else ""
                return []
            self._at_head = False
            text = text.removeprefix(_HEAD)
        # The line end before the closing marker is the format's, not the model's.
        self._held = "\n" if text.endswith("\n") else ""
        text = text.removesuffix("\n")
        return [ReasoningDelta(text)] if text else []

    def _calls(self, token_ids: Sequence[int]) -> list[Delta]:
        pieces = self._pieces(token_ids)
        try:
            name, arguments = _CallReader(pieces).read()
        except _NotACallError:
            raw = '"'.join(pieces).strip()
            return [ContentDelta(raw)] if raw else []
        index, self.tool_calls = self.tool_calls, self.tool_calls + 1
        call_id = f"call_{secrets.token_hex(12)}"
        return [
            ToolCallDelta(index, call_id, name, ""),
            ToolCallDelta(index, None, None, arguments),
        ]

    def _pieces(self, token_ids: Sequence[int]) -> list[str]:
        """Cut a call at its quote tokens: every second piece is a string, whatever stands in it."""
        if self._quote is None:
            return self._tokenizer.decode(token_ids).split('<|"|>')
        cuts = [-1, *(i for i, t in enumerate(token_ids) if t == self._quote), len(token_ids)]
        return [self._tokenizer.decode(token_ids[start + 1 : end]) for start, end in pairwise(cuts)]


def opens_reasoning(tokenizer: Tokenizer, prompt_ids: Sequence[int]) -> bool:
    """Return whether a prompt ends inside a channel, so that the reply begins as reasoning."""
    turn = tokenizer.token_id("<|turn>")
    channel = tokenizer.token_id("<|channel>")
    channel_end = tokenizer.token_id("<channel|>")
    last = next((t for t in reversed(prompt_ids) if t in (turn, channel, channel_end)), None)
    return last is not None and last == channel


class _NotACallError(ValueError):
    """The model's words between the call markers are no call."""


class _CallReader:
    """Reads `call:NAME{key:value,…}`, where a value is a quoted string, a number, a word, a list or an object.

    Also what models write instead: parentheses, `=` for `:`, JSON's own quotes, Python's words, strings without
    quotes. Arguments become JSON text without passing through Python numbers, so digits stay as written.
    """

    def __init__(self, pieces: Sequence[str]) -> None:
        """Take the call's text cut at its quote tokens."""
        self._pieces = pieces
        self._piece = 0  # an even one is syntax, an odd one is a string
        self._at = 0

    def read(self) -> tuple[str, str]:
        """Return the name and the arguments as a JSON object.

        Raises:
            _NotACallError: the text is something else, or is not complete.
        """
        if len(self._pieces) % 2 == 0:
            raise _NotACallError("a string is not closed")
        name = self._expect(_NAME)
        if self._skip("("):
            is_object = self._skip("{")
            arguments = self._object("}" if is_object else ")")
            if is_object and not self._skip(")"):
                raise _NotACallError("no closing parenthesis")
        elif self._skip("{"):
            arguments = self._object("}")
        else:
            raise _NotACallError("no arguments")
        if self._next():
            raise _NotACallError("text behind the call")
        return name.group(1), arguments

    def _object(self, close: str, depth: int = 0) -> str:
        members: dict[str, str] = {}
        while not self._skip(close):
            key = self._string() or json.dumps(
                self._expect(_KEY).group().rstrip(), ensure_ascii=False
            )
            if not (self._skip(":") or self._skip("=")):
                raise _NotACallError("no value for a key")
            members[key] = self._value(depth)
            if not self._skip(",") and self._next() != close:
                raise _NotACallError("no comma")
        return "{" + ", ".join(f"{key}: {value}" for key, value in members.items()) + "}"

    def _list(self, depth: int) -> str:
        items = []
        while not self._skip("]"):
            items.append(self._value(depth))
            if not self._skip(",") and self._next() != "]":
                raise _NotACallError("no comma")
        return "[" + ", ".join(items) + "]"

    def _value(self, depth: int) -> str:
        if depth == _MAX_DEPTH:
            raise _NotACallError("nested too deeply")
        if (string := self._string()) is not None:
            return string
        if self._skip("{"):
            return self._object("}", depth + 1)
        if self._skip("["):
            return self._list(depth + 1)
        text = self._expect(_BARE).group().rstrip()
        word = _PYTHON_WORDS.get(text, text)
        is_json = word in ("true", "false", "null") or _NUMBER.fullmatch(word)
        return word if is_json else json.dumps(text, ensure_ascii=False)

    def _string(self) -> str | None:
        """Return the string that stands here as JSON text, or None if something else does."""
        if not self._next() and self._piece + 1 < len(self._pieces):
            text = self._pieces[self._piece + 1]
            self._piece, self._at = self._piece + 2, 0
        elif self._next() == '"':
            try:
                text, end = json.JSONDecoder(strict=False).raw_decode(
                    self._pieces[self._piece], self._at
                )
            except ValueError as error:
                raise _NotACallError("a string is not closed") from error
            self._at = end
        else:
            return None
        is_broken = any("\ud800" <= char <= "\udfff" for char in text)
        return json.dumps(text, ensure_ascii=is_broken)

    def _next(self) -> str:
        """Skip white space and return the character that stands here; none at the end of a piece."""
        piece = self._pieces[self._piece]
        while self._at < len(piece) and piece[self._at].isspace():
            self._at += 1
        return piece[self._at : self._at + 1]

    def _skip(self, char: str) -> bool:
        is_here = self._next() == char
        self._at += is_here
        return is_here

    def _expect(self, pattern: re.Pattern[str]) -> re.Match[str]:
        self._next()
        match = pattern.match(self._pieces[self._piece], self._at)
        if match is None:
            raise _NotACallError(f"expected {pattern.pattern}")
        self._at = match.end()
        return match
