"""One choice from ids to deltas: stop strings, whole characters, tool calls, finish reasons, counts."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from server.admission import Admission, Prompt
from server.answer import Choice, Delta, Totals, new_reader
from server.engine import Finish, Finished
from server.streaming import Fold
from server.tools import ContentDelta, ToolCallDelta

if TYPE_CHECKING:
    from collections.abc import Sequence

    from server.tokenizer import Tokenizer

CALL, CALL_END, QUOTE, CHANNEL, CHANNEL_END, TURN_END = 48, 49, 52, 100, 101, 106


def admission(prompt: Sequence[int] = (2,), **fields: Any) -> Admission:
    return Admission(
        **{
            "prompts": (Prompt(list(prompt), 50),),
            "stop_ids": None,
            "stop_strings": (),
            "stream": True,
            "include_usage": False,
            "is_chat": True,
            **fields,
        }
    )


def finished(finish: Finish = "stop") -> Finished:
    return Finished(finish, TURN_END if finish == "stop" else None, 0.1, 0.2, 0.0)


def say(
    tokenizer: Tokenizer, admitted: Admission, ids: Sequence[int], finish: Finish = "stop"
) -> tuple[Choice, Fold]:
    """A choice that got `ids` one by one, and what it showed."""
    choice = Choice(0, new_reader(tokenizer, admitted, admitted.prompts[0]), admitted)
    deltas: list[Delta] = []
    for token_id in ids:
        deltas += choice.push([token_id])
    deltas += choice.finish(finished(finish))
    fold = Fold()
    fold.add(deltas)
    return choice, fold


def call(tokenizer: Tokenizer, name: str, city: str) -> list[int]:
    """The ids of a call as Gemma 4 writes it."""
    text = tokenizer.encode_text
    return [CALL, *text(f"call:{name}{{city:"), QUOTE, *text(city), QUOTE, *text("}"), CALL_END]


def test_the_ending_token_counts_and_does_not_show(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode_text("Hello")
    choice, fold = say(tokenizer, admission(), ids)
    assert "".join(fold.text) == "Hello"
    assert (choice.finish_reason, choice.completion_tokens) == ("stop", len(ids) + 1)


def test_a_limit_gives_length_and_counts_what_was_made(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode_text("Hello")
    choice, _ = say(tokenizer, admission(), ids, "length")
    assert (choice.finish_reason, choice.completion_tokens) == ("length", len(ids))


@pytest.mark.parametrize("is_chat", [True, False])
def test_a_stop_string_over_several_tokens_is_cut_and_never_leaks(
    tokenizer: Tokenizer, is_chat: bool
) -> None:
    ids = [i for char in "one STOP two" for i in tokenizer.encode_text(char)]
    admitted = admission(stop_strings=("STOP",), is_chat=is_chat)
    choice, fold = say(tokenizer, admitted, ids, "cancelled")
    assert "".join(fold.text) == "one "
    assert choice.finish_reason == "stop"
    # Only the tokens up to the stop string count, however far the engine was ahead.
    assert choice.completion_tokens == len("one STOP")


def test_a_stop_string_that_does_not_come_true_is_shown_at_the_end(tokenizer: Tokenizer) -> None:
    ids = [i for char in "one STO" for i in tokenizer.encode_text(char)]
    for finish in ("stop", "length"):
        choice, fold = say(tokenizer, admission(stop_strings=("STOP",)), ids, finish)
        assert "".join(fold.text) == "one STO"
        assert choice.finish_reason == finish


def test_a_stop_string_on_the_last_allowed_token_is_a_stop(tokenizer: Tokenizer) -> None:
    ids = [i for char in "oneX" for i in tokenizer.encode_text(char)]
    choice, fold = say(tokenizer, admission(stop_strings=("X",)), ids, "length")
    assert ("".join(fold.text), choice.finish_reason) == ("one", "stop")


def test_half_a_character_waits_for_its_other_half(tokenizer: Tokenizer) -> None:
    emoji = "🦀".encode()
    ids = [tokenizer.token_id(f"<0x{byte:02X}>") for byte in emoji]
    assert None not in ids
    choice = Choice(0, new_reader(tokenizer, admission(), Prompt([2], 9)), admission())
    shown = [choice.push([token_id]) for token_id in ids if token_id is not None]
    assert shown == [[], [], [], [ContentDelta("🦀")]]


def test_a_character_cut_by_the_limit_ends_as_a_replacement(tokenizer: Tokenizer) -> None:
    first = tokenizer.token_id("<0xF0>")
    assert first is not None
    _, fold = say(tokenizer, admission(is_chat=False), [first], "length")
    assert "".join(fold.text) == "\ufffd"


def test_two_calls_have_their_own_index_and_id(tokenizer: Tokenizer) -> None:
    ids = call(tokenizer, "weather", "Oslo") + call(tokenizer, "weather", "Rome")
    choice, fold = say(tokenizer, admission(calls_tools=True), ids)
    first, second = fold.calls[0], fold.calls[1]
    assert (first["function"], second["function"]) == (
        {"name": "weather", "arguments": '{"city": "Oslo"}'},
        {"name": "weather", "arguments": '{"city": "Rome"}'},
    )
    assert first["id"] != second["id"]
    assert first["id"].startswith("call_")
    assert (choice.finish_reason, "".join(fold.text)) == ("tool_calls", "")


def test_one_call_is_kept_when_parallel_calls_are_off(tokenizer: Tokenizer) -> None:
    ids = call(tokenizer, "weather", "Oslo") + call(tokenizer, "weather", "Rome")
    choice, fold = say(tokenizer, admission(calls_tools=True, one_call=True), ids, "cancelled")
    assert list(fold.calls) == [0]
    assert (choice.complete, choice.finish_reason) == (True, "tool_calls")


def test_call_syntax_never_shows_when_no_tool_may_be_called(tokenizer: Tokenizer) -> None:
    ids = [*tokenizer.encode_text("Well. "), *call(tokenizer, "weather", "Oslo")]
    choice, fold = say(tokenizer, admission(), ids)
    assert ("".join(fold.text), fold.calls, choice.finish_reason) == ("Well. ", {}, "stop")


def test_a_call_cut_by_the_limit_is_length_and_no_half_call(tokenizer: Tokenizer) -> None:
    ids = call(tokenizer, "weather", "Oslo")[:-2]
    choice, fold = say(tokenizer, admission(calls_tools=True), ids, "length")
    assert (choice.finish_reason, fold.calls) == ("length", {})


def test_thought_is_apart_from_content_and_counted(tokenizer: Tokenizer) -> None:
    text = tokenizer.encode_text
    ids = [CHANNEL, *text("thought\nA"), CHANNEL_END, *text("B")]
    choice, fold = say(tokenizer, admission(), ids)
    assert ("".join(fold.reasoning), "".join(fold.text)) == ("A", "B")
    assert choice.reasoning_tokens == len(ids) - len(text("B"))


def test_a_stop_string_in_the_thought_does_not_end_the_answer(tokenizer: Tokenizer) -> None:
    text = tokenizer.encode_text
    ids = [CHANNEL, *text("thought\nSTOP"), CHANNEL_END, *text("B")]
    choice, fold = say(tokenizer, admission(stop_strings=("STOP",)), ids)
    assert ("".join(fold.reasoning), "".join(fold.text)) == ("STOP", "B")
    assert choice.finish_reason == "stop"


def test_a_prompt_inside_a_channel_begins_the_reply_as_thought(tokenizer: Tokenizer) -> None:
    text = tokenizer.encode_text
    admitted = admission(prompt=[2, 105, CHANNEL, *text("thought\n")])
    _, fold = say(tokenizer, admitted, [*text("A"), CHANNEL_END, *text("B")])
    assert ("".join(fold.reasoning), "".join(fold.text)) == ("A", "B")


@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    ids=st.lists(st.sampled_from([48, 49, 52, 100, 101, *range(107, 900)]), max_size=30),
    cuts=st.lists(st.integers(1, 4), min_size=30, max_size=30),
    stops=st.lists(st.sampled_from(["e", "th", " a", "\n"]), max_size=2),
    is_chat=st.booleans(),
)
def test_how_tokens_are_batched_changes_nothing(
    tokenizer: Tokenizer, ids: list[int], cuts: list[int], stops: list[str], is_chat: bool
) -> None:
    admitted = admission(stop_strings=tuple(stops), is_chat=is_chat, calls_tools=True)
    one_by_one = say(tokenizer, admitted, ids, "length")
    batched = Choice(0, new_reader(tokenizer, admitted, admitted.prompts[0]), admitted)
    fold, rest = Fold(), ids
    for cut in cuts:
        fold.add(batched.push(rest[:cut]))
        rest = rest[cut:]
    fold.add(batched.finish(finished("length")))
    for each in (fold, one_by_one[1]):
        for made in each.calls.values():
            made["id"] = "call_"
    assert "".join(fold.text) == "".join(one_by_one[1].text)
    assert (fold.reasoning and "".join(fold.reasoning)) == (
        one_by_one[1].reasoning and "".join(one_by_one[1].reasoning)
    )
    assert fold.calls == one_by_one[1].calls
    assert batched.completion_tokens == one_by_one[0].completion_tokens
    assert batched.finish_reason == one_by_one[0].finish_reason


def test_totals_add_up_over_choices(tokenizer: Tokenizer) -> None:
    choice, _ = say(tokenizer, admission(), tokenizer.encode_text("Hi"))
    totals = Totals(prompt_tokens=7, queue_seconds=1.0)
    twice = totals.plus(choice, finished()).plus(choice, finished())
    assert twice.completion_tokens == 2 * choice.completion_tokens
    assert (twice.prompt_tokens, twice.queue_seconds) == (7, 1.0)
    assert (twice.prefill_seconds, twice.decode_seconds) == (0.2, 0.4)


def test_a_tool_delta_after_the_first_carries_only_arguments() -> None:
    fold = Fold()
    fold.add([ToolCallDelta(0, "call_a", "f", ""), ToolCallDelta(0, None, None, "{}")])
    assert fold.calls == {
        0: {"id": "call_a", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    }
