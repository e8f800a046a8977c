"""Conversations: calls and results, content, roles, answers to continue; faults are named by their path."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from text_fixtures import Message, call, tool, weather

from server.chat import ChatError, ChatTemplate

if TYPE_CHECKING:
    from server.tokenizer import Tokenizer


# Tool calls and results


def _printed(template: ChatTemplate, messages: list[Message]) -> str:
    return template.render(messages, tools=[tool()]).text


def test_a_tool_loop_prints_the_call_once_and_the_result_under_its_name(
    template: ChatTemplate,
) -> None:
    text = _printed(template, weather())
    assert text.count('<|tool_call>call:weather{city:<|"|>Oslo<|"|>}<tool_call|>') == 1
    assert text.endswith('<|tool_response>response:weather{value:<|"|>4 C<|"|>}<tool_response|>')
    assert "None" not in text
    assert "null" not in text


@pytest.mark.parametrize("content", [None, "", "absent"])
def test_missing_content_prints_nothing(template: ChatTemplate, content: str | None) -> None:
    messages = weather(content=content)
    if content == "absent":
        del messages[1]["content"]
    assert _printed(template, messages) == _printed(template, weather())


@pytest.mark.parametrize("arguments", ["", "{}", {}, None])
def test_a_call_without_arguments_prints_empty_braces(
    template: ChatTemplate, arguments: object
) -> None:
    assert "<|tool_call>call:weather{}<tool_call|>" in _printed(template, weather(arguments))


def test_arguments_may_be_an_object(template: ChatTemplate) -> None:
    assert _printed(template, weather({"city": "Oslo"})) == _printed(template, weather())


@pytest.mark.parametrize(
    "arguments", ["not json", "[1]", '"text"', "NaN", "[" * 100_000, "9" * 5000, 7]
)
def test_arguments_that_are_no_json_object_are_named_by_their_path(
    template: ChatTemplate, arguments: object
) -> None:
    with pytest.raises(ChatError, match="expected a JSON object as text, found") as caught:
        template.render(weather(arguments))
    assert caught.value.param == "messages[1].tool_calls[0].function.arguments"
    assert len(str(caught.value)) < 200


def test_an_empty_list_of_calls_is_no_call(template: ChatTemplate) -> None:
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yes"}]
    with_list = [messages[0], {**messages[1], "tool_calls": []}]
    assert _printed(template, with_list) == _printed(template, messages)


def test_results_are_matched_by_id_and_not_by_order(template: ChatTemplate) -> None:
    text = _printed(
        template,
        [
            {"role": "user", "content": "both"},
            {"role": "assistant", "tool_calls": [call("first", {}, "a"), call("second", {}, "b")]},
            {"role": "tool", "tool_call_id": "b", "content": "two"},
            {"role": "tool", "tool_call_id": "a", "content": [{"type": "text", "text": "one"}]},
        ],
    )
    assert 'response:second{value:<|"|>two<|"|>}' in text
    assert 'response:first{value:<|"|>one<|"|>}' in text


@pytest.mark.parametrize("call_id", ["call_2", None, 7])
def test_a_result_for_an_unknown_call_is_named_by_its_path(
    template: ChatTemplate, call_id: object
) -> None:
    messages = [*weather()[:2], {"role": "tool", "tool_call_id": call_id, "content": "4 C"}]
    with pytest.raises(ChatError, match="expected the id of a tool call") as caught:
        template.render(messages)
    assert caught.value.param == "messages[2].tool_call_id"


def test_templates_without_tool_messages_get_results_with_the_calls(tokenizer: Tokenizer) -> None:
    source = (
        "{% for m in messages %}{{ m.role }};{% for r in m.tool_responses %}"
        "{{ r.name }}={{ r.response }};{% endfor %}{% endfor %}"
    )
    prompt = ChatTemplate(source, tokenizer).render(weather())
    assert prompt.text == "user;assistant;weather=4 C;"


# Content and roles


def test_parts_are_joined_for_a_template_that_prints_lists_as_python(tokenizer: Tokenizer) -> None:
    template = ChatTemplate("{% for m in messages %}{{ m.content }}{% endfor %}", tokenizer)
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    assert template.render([{"role": "user", "content": parts}]).text == "one\ntwo"


@pytest.mark.parametrize(
    ("message", "param"),
    [
        ({}, "messages[0].role"),
        ({"role": "wizard", "content": "x"}, "messages[0].role"),
        ({"role": "user", "content": 7}, "messages[0].content"),
        ({"role": "user", "content": ["text"]}, "messages[0].content[0].type"),
        ({"role": "user", "content": [{"type": "image_url"}]}, "messages[0].content[0].type"),
        ({"role": "user", "content": [{"type": "text"}]}, "messages[0].content[0].text"),
        ({"role": "user", "content": "a\ud800b"}, "messages[0].content"),
        ({"role": "assistant", "tool_calls": 7}, "messages[0].tool_calls"),
        ({"role": "assistant", "tool_calls": [{}]}, "messages[0].tool_calls[0].function.name"),
        ({"role": "tool", "content": "x"}, "messages[0].tool_call_id"),
    ],
)
def test_a_malformed_message_is_named_by_its_path(
    template: ChatTemplate, message: Message, param: str
) -> None:
    with pytest.raises(ChatError, match=r"expected .*, found") as caught:
        template.render([message])
    assert caught.value.param == param


def test_no_messages_and_nameless_tools_are_refused(template: ChatTemplate) -> None:
    with pytest.raises(ChatError, match="at least one message"):
        template.render([])
    with pytest.raises(ChatError) as caught:
        template.render([{"role": "user", "content": "hi"}], tools=[{"type": "function"}])
    assert caught.value.param == "tools[0].function.name"


def test_null_fields_of_a_tool_are_not_printed(template: ChatTemplate) -> None:
    bare = {"type": "function", "function": {"name": "f", "description": None, "parameters": None}}
    text = template.render([{"role": "user", "content": "hi"}], tools=[bare]).text
    assert '<|tool>declaration:f{description:<|"|><|"|>}<tool|>' in text


@pytest.mark.parametrize("name", ["messages", "bos_token", "raise_exception", "range"])
def test_variables_cannot_replace_what_the_server_gives_the_template(
    template: ChatTemplate, name: str
) -> None:
    with pytest.raises(ChatError) as caught:
        template.render([{"role": "user", "content": "hi"}], variables={name: "x"})
    assert caught.value.param == f"chat_template_kwargs.{name}"


def test_thinking_is_off_unless_asked_for(template: ChatTemplate) -> None:
    messages = [{"role": "user", "content": "hi"}]
    assert "<|think|>" not in template.render(messages).text
    thinking = template.render(messages, variables={"enable_thinking": True})
    assert thinking.text.startswith("<bos><|turn>system\n<|think|>\n<turn|>\n")


# Continuing an answer


def _continued(template: ChatTemplate, content: object, **options: Any) -> str:
    messages = [
        {"role": "user", "content": "Count to five."},
        {"role": "assistant", "content": content},
    ]
    return template.render(
        messages, add_generation_prompt=False, continue_final_message=True, **options
    ).text


def test_a_continued_prompt_ends_exactly_with_the_answers_text(template: ChatTemplate) -> None:
    for content in ("1, 2,", "1, 2, ", [{"type": "text", "text": "1, 2,"}]):
        assert _continued(template, content).endswith("<turn|>\n<|turn>model\n1, 2,")
    assert _continued(template, "1, 2,", tools=[tool()]).endswith("<|turn>model\n1, 2,")


def test_continuing_an_empty_answer_leaves_the_opened_turn(template: ChatTemplate) -> None:
    for content in ("", "  \n"):
        assert _continued(template, content).endswith("<|turn>model\n")


def test_a_template_that_keeps_white_space_keeps_it_in_the_continued_text(
    tokenizer: Tokenizer,
) -> None:
    source = "{% for m in messages %}{{ m.content }}<turn|>{% endfor %}"
    assert _continued(ChatTemplate(source, tokenizer), "1, 2, ") == "Count to five.<turn|>1, 2, "


@pytest.mark.parametrize(
    ("final", "param"),
    [
        ({"role": "user", "content": "hi"}, "messages[0].role"),
        ({"role": "assistant", "tool_calls": [call("f", {})]}, "messages[0].content"),
    ],
)
def test_only_text_of_the_assistant_can_be_continued(
    template: ChatTemplate, final: Message, param: str
) -> None:
    with pytest.raises(ChatError) as caught:
        template.render([final], add_generation_prompt=False, continue_final_message=True)
    assert caught.value.param == param


def test_continuing_and_opening_a_turn_exclude_each_other(template: ChatTemplate) -> None:
    with pytest.raises(ChatError) as caught:
        template.render([{"role": "assistant", "content": "a"}], continue_final_message=True)
    assert caught.value.param == "continue_final_message"
