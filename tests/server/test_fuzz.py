"""Whatever a client sends is answered with 200 or a 4xx in OpenAI's form, and the server lives on."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from server.protocol import ChatRequest, CompletionRequest
from server.refusals import ACCEPTED, REFUSED

if TYPE_CHECKING:
    from tests.server.live_server import Live

pytest_plugins = ["tests.server.http_fixtures"]

SETTINGS = settings(
    max_examples=30,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
NUMBERS = st.one_of(
    st.integers(-(2**70), 2**70), st.floats(allow_nan=False, allow_infinity=False), st.just(1e308)
)
TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
# Short texts that mean something somewhere.
WORDS = st.sampled_from(
    [
        "",
        "user",
        "assistant",
        "tool",
        "text",
        "auto",
        "none",
        "<turn|>",
        "<bos>",
        "function",
        "\x00",
    ]
)
VALUES: st.SearchStrategy[Any] = st.recursive(
    st.one_of(st.none(), st.booleans(), NUMBERS, TEXT, WORDS),
    lambda inner: st.one_of(
        st.lists(inner, max_size=4), st.dictionaries(st.one_of(TEXT, WORDS), inner, max_size=4)
    ),
    max_leaves=8,
)
MESSAGE = st.fixed_dictionaries(
    {},
    optional={
        "role": st.one_of(st.sampled_from(["system", "user", "assistant", "tool"]), VALUES),
        "content": st.one_of(TEXT, VALUES),
        "tool_calls": VALUES,
        "tool_call_id": VALUES,
        "name": VALUES,
        "reasoning_content": VALUES,
    },
)
FIELDS = sorted({*ChatRequest.model_fields, *CompletionRequest.model_fields, *REFUSED, *ACCEPTED})


def answered(live: Live, path: str, body: object) -> None:
    response = live.http.post(path, json=body)
    if response.status_code == 200:
        return
    assert 400 <= response.status_code < 500, response.text
    error = response.json()["error"]
    assert {"message", "type", "param", "code"} <= error.keys()
    assert len(response.content) < 8192


@SETTINGS
@given(
    messages=st.lists(MESSAGE, max_size=3),
    fields=st.dictionaries(st.sampled_from(FIELDS), VALUES, max_size=3),
)
def test_chat_takes_anything(live: Live, messages: Any, fields: dict[str, Any]) -> None:
    body = {"messages": messages, "max_tokens": 5, **fields}
    answered(live, "/v1/chat/completions", body)
    answered(live, "/v1/chat/completions/render", body)


@SETTINGS
@given(prompt=VALUES, fields=st.dictionaries(st.sampled_from(FIELDS), VALUES, max_size=3))
def test_completions_take_anything(live: Live, prompt: Any, fields: dict[str, Any]) -> None:
    answered(live, "/v1/completions", {"prompt": prompt, "max_tokens": 5, **fields})


@SETTINGS
@given(body=st.dictionaries(st.sampled_from(["prompt", "content", "messages", "tokens"]), VALUES))
def test_tokenizing_takes_anything(live: Live, body: dict[str, Any]) -> None:
    answered(live, "/tokenize", body)
    answered(live, "/detokenize", body)


@SETTINGS
@given(raw=st.binary(max_size=200))
def test_any_bytes_are_a_body(live: Live, raw: bytes) -> None:
    response = live.http.post(
        "/v1/chat/completions", content=raw, headers={"content-type": "application/json"}
    )
    assert response.status_code == 400
    assert "error" in response.json()


@pytest.mark.parametrize("depth", [10, 40, 90, 150, 199])
def test_nesting_of_any_depth_is_answered(live: Live, depth: int) -> None:
    value: Any = "x"
    for _ in range(depth):
        value = {"a": [value]} if depth % 2 else [value]
    tool = {"type": "function", "function": {"name": "f", "parameters": {"a": value}}}
    for body in (
        {"messages": [{"role": "user", "content": value}]},
        {"messages": [{"role": "user", "content": "x"}], "tools": [tool]},
        {"messages": [{"role": "user", "content": "x"}], "metadata": value},
    ):
        if len(json.dumps(body)) < 10_000:
            answered(live, "/v1/chat/completions", body)
