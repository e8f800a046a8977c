"""Replies: reasoning and calls are told by ids, calls become JSON, nothing is lost and no marker is shown."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from server.tools import (
    ContentDelta,
    Delta,
    ReasoningDelta,
    ReplyParser,
    ToolCallDelta,
    opens_reasoning,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from server.chat import ChatTemplate
    from server.tokenizer import Tokenizer

Q = '<|"|>'


class Reply:
    """The deltas of one reply, put together as a client does."""

    def __init__(self, deltas: Sequence[Delta]) -> None:
        self.deltas = deltas
        self.content = "".join(d.text for d in deltas if isinstance(d, ContentDelta))
        self.reasoning = "".join(d.text for d in deltas if isinstance(d, ReasoningDelta))
        self.calls: list[tuple[str, str]] = []
        for delta in deltas:
            if not isinstance(delta, ToolCallDelta):
                continue
            if delta.name is not None:
                assert delta.index == len(self.calls)
                self.calls.append((delta.name, ""))
            name, arguments = self.calls[delta.index]
            self.calls[delta.index] = (name, arguments + delta.arguments)


def read(
    tokenizer: Tokenizer, text: str, *, parse_tools: bool = True, in_reasoning: bool = False
) -> Reply:
    """Read a reply written with its markers."""
    parser = ReplyParser(tokenizer, parse_tools=parse_tools, in_reasoning=in_reasoning)
    deltas = [d for token_id in tokenizer.encode_prompt(text) for d in parser.push(token_id)]
    return Reply([*deltas, *parser.finish()])


def arguments_of(tokenizer: Tokenizer, call: str) -> Any:
    """Read a reply that is one call and return its arguments."""
    reply = read(tokenizer, f"<|tool_call>{call}<tool_call|>")
    assert reply.content == ""
    [(name, arguments)] = reply.calls
    assert name == "f"
    return json.loads(arguments)


# Reasoning


@pytest.mark.parametrize(
    ("text", "reasoning", "content"),
    [
        ("<|channel>thought\nA<channel|>B", "A", "B"),
        ("<|channel>thought\nA\nB\n<channel|>C", "A\nB", "C"),
        ("<|channel>thought\n<channel|>B", "", "B"),
        ("<|channel>thought<channel|>B", "", "B"),
        ("<|channel>thoughtful<channel|>B", "thoughtful", "B"),
        ("<|channel>tho<channel|>B", "tho", "B"),
        ("<|channel>thought\nA", "A", ""),
        ("<|channel>thought\nA\n", "A\n", ""),
        ("<|channel>thought\nA<channel|>B<|channel>thought\nC<channel|>D", "AC", "BD"),
        ("<|channel>thought\nA<turn|>", "A", ""),
        ("thought\nB", "", "thought\nB"),
        ("A<channel|>B", "", "AB"),
        ("<eos><|turn>B<turn|>", "", "B"),
    ],
)
def test_channels_are_reasoning_and_the_rest_is_content(
    tokenizer: Tokenizer, text: str, reasoning: str, content: str
) -> None:
    reply = read(tokenizer, text)
    assert (reply.reasoning, reply.content) == (reasoning, content)


@pytest.mark.parametrize("text", ["A<channel|>B", "thought\nA<channel|>B", "A\n<channel|>B"])
def test_a_reply_may_begin_inside_the_prompts_channel(tokenizer: Tokenizer, text: str) -> None:
    reply = read(tokenizer, text, in_reasoning=True)
    assert (reply.reasoning, reply.content) == ("A", "B")


def test_reasoning_tokens_count_the_channel_with_both_markers(tokenizer: Tokenizer) -> None:
    channel = tokenizer.encode_prompt("<|channel>thought\nA<channel|>")
    parser = ReplyParser(tokenizer, parse_tools=True)
    for token_id in [*channel, *tokenizer.encode_prompt("B and C")]:
        parser.push(token_id)
    assert parser.reasoning_tokens == len(channel)


def test_markers_spelled_in_text_are_text(tokenizer: Tokenizer) -> None:
    parser = ReplyParser(tokenizer, parse_tools=True)
    text = "<|channel>thought\nA<channel|> <|tool_call>call:f{}<tool_call|>"
    deltas = [d for token_id in tokenizer.encode_text(text) for d in parser.push(token_id)]
    assert Reply([*deltas, *parser.finish()]).content == text


def test_characters_are_whole_on_both_sides_of_a_marker(tokenizer: Tokenizer) -> None:
    half = [tokenizer.token_id(f"<0x{byte:02X}>") or 0 for byte in "🙂".encode()[:2]]
    parser = ReplyParser(tokenizer, parse_tools=True)
    deltas = [d for token_id in [*half, 100, *half, 101, *half] for d in parser.push(token_id)]
    reply = Reply([*deltas, *parser.finish()])
    assert (reply.content, reply.reasoning) == ("��", "�")


def test_a_prompt_that_ends_inside_a_channel_is_seen(tokenizer: Tokenizer) -> None:
    prompt = "<bos><|turn>user\nhi<turn|>\n<|turn>model\n"
    for tail, is_open in (
        ("", False),
        ("<|channel>thought\n", True),
        ("<|channel>thought\n<channel|>", False),
    ):
        assert opens_reasoning(tokenizer, tokenizer.encode_prompt(prompt + tail)) is is_open


# Calls


def test_a_call_has_an_id_and_joins_to_json(tokenizer: Tokenizer) -> None:
    reply = read(
        tokenizer,
        f"Let me see.<|tool_call>call:weather{{city:{Q}Oslo{Q}}}<tool_call|>"
        f"<|tool_call>call:clock{{}}<tool_call|>",
    )
    assert reply.content == "Let me see."
    assert reply.calls == [("weather", '{"city": "Oslo"}'), ("clock", "{}")]
    first, _, second, _ = [d for d in reply.deltas if isinstance(d, ToolCallDelta)]
    assert first.id is not None
    assert first.id.startswith("call_")
    assert first.arguments == ""
    assert second.id not in (None, first.id)


@pytest.mark.parametrize(
    ("call", "arguments"),
    [
        (f"call:f{{a:{Q}x{Q},b:1,c:-2.5e3,d:true,e:false,g:null}}",
         {"a": "x", "b": 1, "c": -2500.0, "d": True, "e": False, "g": None}),
        (f"call:f{{list:[1,{Q}two{Q},[3],{{}}],obj:{{a:{{b:[]}}}}}}",
         {"list": [1, "two", [3], {}], "obj": {"a": {"b": []}}}),
        (f"call:f{{a:{Q}}} ]\",:{{{Q}}}", {"a": '} ]",:{'}),
        (f"call:f{{a:{Q}{Q}}}", {"a": ""}),
        (f"call:f{{a:{Q}line\nend\t\\ \"{Q}}}", {"a": 'line\nend\t\\ "'}),
        (f"call:f{{{Q}quoted key{Q}:1,odd key:2,x-y.z:3}}", {"quoted key": 1, "odd key": 2, "x-y.z": 3}),
        ('call:f{"a": "JSON \\"}\\u00e9", "b": [1, "x"]}', {"a": 'JSON "}é', "b": [1, "x"]}),
        ('call:f{a:"raw\nline"}', {"a": "raw\nline"}),
        ('call:f{a:"\\ud800"}', {"a": "\ud800"}),
        ("call:f(a=1, b=[2])", {"a": 1, "b": [2]}),
        (f"call:f({{a:{Q}x{Q}}})", {"a": "x"}),
        ("call:f()", {}),
        (" call: f { a : 1 , } ", {"a": 1}),
        ("call:f{a:celsius,b:two words,c:12:30,d:007}",
         {"a": "celsius", "b": "two words", "c": "12:30", "d": "007"}),
        ("call:f{a:True,b:None}", {"a": True, "b": None}),
        ("call:f{a:1,a:2}", {"a": 2}),
    ],
)  # fmt: skip
def test_every_way_to_write_arguments_becomes_json(
    tokenizer: Tokenizer, call: str, arguments: object
) -> None:
    assert arguments_of(tokenizer, call) == arguments


@pytest.mark.parametrize("name", ["get_weather", "my-tool", "ns.tool", "server:tool", "a1"])
def test_names_with_hyphens_dots_and_colons_are_whole(tokenizer: Tokenizer, name: str) -> None:
    for call in (f"call:{name}{{}}", f"call:{name}()"):
        assert read(tokenizer, f"<|tool_call>{call}<tool_call|>").calls == [(name, "{}")]


def test_numbers_keep_their_digits(tokenizer: Tokenizer) -> None:
    call = "call:f{a:12345678901234567890.10,b:1e400,c:1.0}"
    reply = read(tokenizer, f"<|tool_call>{call}<tool_call|>")
    assert reply.calls == [("f", '{"a": 12345678901234567890.10, "b": 1e400, "c": 1.0}')]


NAMES = st.text("abc_-.", min_size=1, max_size=5)
TEXTS = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="▁"), max_size=10)
VALUES = st.recursive(
    TEXTS
    | st.sampled_from([Q, "<tool_call|>", "<turn|>", "{", "}", '"', "\\", "call:f{}"])
    | st.booleans()
    | st.none()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(NAMES, inner, max_size=3),
    max_leaves=8,
)


@settings(max_examples=200, deadline=None)
@given(arguments=st.dictionaries(NAMES, VALUES, max_size=4))
def test_what_the_template_prints_as_a_call_is_read_back(
    template: ChatTemplate, tokenizer: Tokenizer, arguments: dict[str, Any]
) -> None:
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": arguments}}
    messages = [{"role": "assistant", "tool_calls": [call]}]
    token_ids = template.render(messages, add_generation_prompt=False).token_ids
    parser = ReplyParser(tokenizer, parse_tools=True)
    deltas = [d for token_id in token_ids[token_ids.index(48) :] for d in parser.push(token_id)]
    [(name, written)] = Reply([*deltas, *parser.finish()]).calls
    assert name == "f"
    assert json.loads(written) == arguments


@pytest.mark.parametrize(
    "call",
    [
        "not a call",
        "call:f",
        "call:{}",
        "call:f{a}",
        "call:f{a:}",
        "call:f{a:1",
        "call:f{a:1}}",
        "call:f{a:[1}",
        'call:f{a:"open}',
        "call:f{a:b(c)}",
        "call:f({a:1}",
        "call:f{a:" + "[" * 500 + "]" * 500 + "}",
    ],
)
def test_a_call_that_cannot_be_read_is_kept_as_content(tokenizer: Tokenizer, call: str) -> None:
    reply = read(tokenizer, f"<|tool_call>{call}<tool_call|> after")
    assert reply.calls == []
    assert reply.content == f"{call} after"


def test_a_call_cut_by_the_end_is_kept_as_content(tokenizer: Tokenizer) -> None:
    reply = read(tokenizer, f"<|tool_call>call:f{{city:{Q}Os")
    assert (reply.content, reply.calls) == ('call:f{city:"Os', [])


@pytest.mark.parametrize("end", ["", "<tool_call|>", "<|tool_response>", "<turn|>", "<eos>"])
def test_a_whole_call_counts_whatever_ends_it(tokenizer: Tokenizer, end: str) -> None:
    reply = read(tokenizer, f"<|tool_call>call:f{{a:1}}{end}")
    assert reply.calls == [("f", '{"a": 1}')]
    assert reply.content == ""


def test_a_call_that_opens_inside_another_or_inside_reasoning_begins_anew(
    tokenizer: Tokenizer,
) -> None:
    text = "<|channel>thought\nA<|tool_call>call:f{}<|tool_call>call:g{}<tool_call|>B"
    reply = read(tokenizer, text)
    assert reply.calls == [("f", "{}"), ("g", "{}")]
    assert (reply.reasoning, reply.content) == ("A", "B")


def test_without_tools_no_call_syntax_is_shown(tokenizer: Tokenizer) -> None:
    for call in ("call:f{}<tool_call|>", "call:f{", "nonsense<tool_call|>"):
        reply = read(tokenizer, f"A<|tool_call>{call}", parse_tools=False)
        assert (reply.content, reply.calls) == ("A", [])


@given(token_ids=st.lists(st.integers(0, 899) | st.sampled_from([48, 49, 50, 52, 100, 101, 106])))
def test_any_ids_give_valid_deltas(tokenizer: Tokenizer, token_ids: list[int]) -> None:
    parser = ReplyParser(tokenizer, parse_tools=True)
    deltas = [d for token_id in token_ids for d in parser.push(token_id)] + parser.finish()
    reply = Reply(deltas)
    assert len(reply.calls) == parser.tool_calls
    for _, arguments in reply.calls:
        assert isinstance(json.loads(arguments), dict)
    assert all(d.text for d in deltas if not isinstance(d, ToolCallDelta))
    assert 0 <= parser.reasoning_tokens <= len(token_ids)
