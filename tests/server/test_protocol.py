"""Request bodies to request models: what is accepted, and which field a refusal names."""

from __future__ import annotations

import json
from typing import Any

import pytest

from server.errors import ApiError
from server.protocol import (
    ChatRequest,
    CompletionRequest,
    field_path,
    parse_json,
    parse_request,
)
from server.refusals import REFUSED, UnknownFields, refuse_unsupported, refuse_unsupported_chat

MESSAGES = [{"role": "user", "content": "Say hi."}]
WEATHER = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}


def chat(**fields: Any) -> ChatRequest:
    body = {"messages": MESSAGES, **fields}
    request = parse_request(ChatRequest, body)
    refuse_unsupported_chat(request, body)
    return request


def completion(**fields: Any) -> CompletionRequest:
    body = {"prompt": "Once", **fields}
    request = parse_request(CompletionRequest, body)
    refuse_unsupported(request, body)
    return request


def refusal(make: Any, **fields: Any) -> ApiError:
    with pytest.raises(ApiError) as caught:
        make(**fields)
    assert caught.value.status == 400
    assert len(json.dumps(caught.value.body())) < 8192
    return caught.value


@pytest.mark.parametrize(
    ("stop", "expected"),
    [
        (None, []),
        ([], []),
        ("a", ["a"]),
        (["a", "b", "c", "d"], ["a", "b", "c", "d"]),
        ("x" * 10_000, ["x" * 10_000]),
        # Two code points: compared as they are, without normalizing.
        ("e\u0301", ["e\u0301"]),
    ],
)
def test_stop_takes_null_a_string_or_one_to_four(stop: object, expected: list[str]) -> None:
    assert chat(stop=stop).stop == expected
    assert completion(stop=stop).stop == expected


@pytest.mark.parametrize("stop", ["", [""], ["a", ""], 7, ["a", None], list("abcde"), {"a": 1}])
def test_stop_of_another_shape_is_refused_by_name(stop: object) -> None:
    assert refusal(chat, stop=stop).param == "stop"
    assert refusal(completion, stop=stop).param == "stop"


@pytest.mark.parametrize(("value", "expected"), [(5, 5), (1.0, 1), (None, None), (2**63, 2**63)])
def test_a_limit_is_any_whole_number(value: object, expected: object) -> None:
    assert chat(max_tokens=value).max_tokens == expected
    assert chat(max_completion_tokens=value).max_completion_tokens == expected


@pytest.mark.parametrize("value", [0, -1, 1.5, "5", True, [5], 1e400])
def test_a_limit_that_is_no_positive_whole_number_is_refused_by_name(value: object) -> None:
    assert refusal(chat, max_tokens=value).param == "max_tokens"
    assert refusal(chat, max_completion_tokens=value).param == "max_completion_tokens"


def test_a_completion_may_ask_for_no_token_but_not_for_fewer() -> None:
    assert completion(max_tokens=0).max_tokens == 0
    assert refusal(completion, max_tokens=-1).param == "max_tokens"


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("a", ["a"]),
        ("", [""]),
        (["a"], ["a"]),
        ([""], [""]),
        (["a", "b"], ["a", "b"]),
        ([5, 6], [[5, 6]]),
        ([[5], [6, 7]], [[5], [6, 7]]),
    ],
)
def test_a_prompt_has_four_shapes(prompt: object, expected: object) -> None:
    assert completion(prompt=prompt).prompt == expected


@pytest.mark.parametrize(
    "prompt", [None, [], [[]], [1.5], [True], ["a", 5], [5, [6]], 7, {"text": "a"}, [None]]
)
def test_a_prompt_of_another_shape_is_refused_by_name(prompt: object) -> None:
    assert refusal(completion, prompt=prompt).param == "prompt"


def test_a_missing_field_is_named() -> None:
    for kind, param in ((ChatRequest, "messages"), (CompletionRequest, "prompt")):
        with pytest.raises(ApiError, match=f"Missing required parameter: {param}") as caught:
            parse_request(kind, {})
        assert caught.value.param == param


@pytest.mark.parametrize("messages", [None, {}, [], "hi", ["hi"], [1, 2, 3]])
def test_messages_have_to_be_a_list_of_objects(messages: object) -> None:
    param = refusal(chat, messages=messages).param
    assert param is not None
    assert param.startswith("messages")


def test_an_error_stays_small_whatever_came_in() -> None:
    error = refusal(chat, messages=list(range(20_000)))
    assert error.param == "messages[0]"
    error = refusal(chat, **{"stop_token_ids": ["x" * 100_000]})
    assert error.param == "stop_token_ids[0]"


@pytest.mark.parametrize("name", sorted(REFUSED))
def test_every_field_that_is_not_honoured_is_refused_by_name_and_harmless_when_null(
    name: str,
) -> None:
    telling: dict[str, object] = {
        "temperature": 0.7,
        "n": 2,
        "logprobs": True,
        "top_logprobs": 2,
        "frequency_penalty": 1,
        "presence_penalty": 1,
    }
    error = refusal(chat, **{name: telling.get(name, "something else")})
    assert (error.param, error.code) == (name, "unsupported")
    assert "not supported yet" in error.message
    chat(**{name: None})
    for value in REFUSED[name].harmless:
        chat(**{name: value})


def test_false_and_zero_are_told_apart() -> None:
    # In completions `logprobs: 0` asks for the chosen token's probability.
    assert refusal(completion, logprobs=0).param == "logprobs"
    completion(logprobs=False)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", -1),
        ("temperature", 3),
        ("temperature", "0"),
        ("temperature", 1e400),
        ("top_p", 0),
        ("top_p", 1.5),
        ("top_k", -2),
        ("n", 0),
        ("n", -1),
        ("n", 129),
        ("n", "2"),
        ("top_logprobs", 21),
        ("top_logprobs", -1),
        ("stream", "true"),
        ("stream", 1),
        ("seed", 1.5),
        ("model", 7),
        ("stop_token_ids", 5),
        ("parallel_tool_calls", "no"),
        ("ignore_eos", 1),
    ],
)
def test_a_value_outside_its_range_or_type_is_refused_by_name(field: str, value: object) -> None:
    assert refusal(chat, **{field: value}).param == field


@pytest.mark.parametrize(
    "fields",
    [
        {"temperature": 0},
        {"temperature": 0.0, "top_p": 0.5, "top_k": 40, "min_p": 0.1, "seed": 7},
        {"n": 1, "user": "me", "metadata": {"a": "b"}, "store": False, "service_tier": "auto"},
        {"logit_bias": {}, "response_format": {"type": "text"}, "modalities": ["text"]},
        {"chat_template_kwargs": {}},
        {"chat_template_kwargs": {"enable_thinking": False}, "reasoning_effort": "none"},
        {"stream": True, "stream_options": {"include_usage": True}},
        {"stream": True, "stream_options": None},
        {"tools": [], "tool_choice": "auto"},
        {"tools": [WEATHER], "tool_choice": "none", "parallel_tool_calls": False},
    ],
)
def test_what_changes_nothing_under_greedy_decoding_is_accepted(fields: dict[str, Any]) -> None:
    chat(**fields)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        (
            {"chat_template_kwargs": {"enable_thinking": True}},
            "chat_template_kwargs.enable_thinking",
        ),
        ({"chat_template_kwargs": {"other": 1}}, "chat_template_kwargs.other"),
        ({"chat_template_kwargs": [1]}, "chat_template_kwargs"),
        ({"tools": [WEATHER], "tool_choice": "required"}, "tool_choice"),
        ({"tools": [WEATHER], "tool_choice": "sometimes"}, "tool_choice"),
        ({"tool_choice": "required"}, "tool_choice"),
        (
            {
                "tools": [WEATHER],
                "tool_choice": {"type": "function", "function": {"name": "weather"}},
            },
            "tool_choice",
        ),
        (
            {
                "tools": [WEATHER],
                "tool_choice": {"type": "function", "function": {"name": "other"}},
            },
            "tool_choice",
        ),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name"),
        (
            {"tools": [{"type": "function", "function": {"name": "x" * 65}}]},
            "tools[0].function.name",
        ),
        ({"tools": [{"type": "function", "function": {"name": "a\n"}}]}, "tools[0].function.name"),
        ({"tools": [{"type": "code"}]}, "tools[0].type"),
        ({"continue_final_message": True, "add_generation_prompt": True}, "continue_final_message"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"stream": True, "stream_options": {"include_usage": 1}}, "stream_options.include_usage"),
        (
            {"stream": True, "stream_options": {"continuous_usage_stats": True}},
            "stream_options.continuous_usage_stats",
        ),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"response_format": {"type": "json_schema", "schema": {}}}, "response_format"),
        ({"response_format": {"type": "xml"}}, "response_format"),
    ],
)
def test_what_would_change_the_answer_is_refused_with_its_path(
    fields: dict[str, Any], param: str
) -> None:
    assert refusal(chat, **fields).param == param


def test_a_logit_bias_is_refused_with_the_id_it_names() -> None:
    for bias in ({"99999999": 5}, {"-1": 5}, {"AI": 5}, {"5": 1e9}, {"5": None}):
        error = refusal(chat, logit_bias=bias)
        assert error.param == "logit_bias"
        assert next(iter(bias)) in error.message


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"{",
        b'{"a": 1',
        b"[1]",
        b'"just a string"',
        b"null",
        b'{"temperature": NaN}',
        b'{"temperature": -Infinity}',
        b'{"content": "a\\ud800b"}',
        b'{"\\udc00": 1}',
        b'{"content": "\xff"}',
        b"[" * 5000,
        b'{"a":' * 5000,
        b'{"max_tokens": ' + b"1" * 5000 + b"}",
        b'{"a": 1} trailing',
    ],
)
def test_a_body_that_is_no_json_object_is_refused_without_internals(raw: bytes) -> None:
    with pytest.raises(ApiError) as caught:
        parse_json(raw)
    assert caught.value.status == 400
    assert "Error" not in caught.value.message
    assert "/" not in caught.value.message


def test_the_last_of_two_equal_keys_wins_and_nul_is_text() -> None:
    assert parse_json(b'{"a": 1, "a": "\\u0000"}') == {"a": "\x00"}


def test_field_paths_read_as_a_client_writes_them() -> None:
    assert field_path(("messages", 0, "content", 2, "type")) == "messages[0].content[2].type"
    assert field_path(()) == ""


def test_unknown_fields_are_accepted_and_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    unknown = UnknownFields()
    request = chat(shiny_new_field=1, user="me")
    unknown.note(request)
    unknown.note(request)
    assert caplog.text.count("shiny_new_field") == 1
    assert "user" not in caplog.text
    for number in range(300):
        unknown.note(chat(**{f"field_{number}": 1}))
    assert "field_299" not in caplog.text
