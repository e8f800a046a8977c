"""The template's sandbox: what a template may say, and bounds that no client can get past."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import pytest
from text_fixtures import tool, weather

from server import sandbox
from server.chat import ChatError, ChatTemplate
from server.conversation import MAX_DEPTH

if TYPE_CHECKING:
    from collections.abc import Callable

    from server.tokenizer import Tokenizer


def test_a_templates_refusal_reaches_the_client_as_its_sentence(tokenizer: Tokenizer) -> None:
    source = "{% if messages[0].role != 'user' %}{{ raise_exception('Start with ' + messages[0].content) }}{% endif %}"
    template = ChatTemplate(source, tokenizer)
    with pytest.raises(ChatError) as caught:
        template.render([{"role": "system", "content": "<bos>"}])
    assert str(caught.value) == "Start with <bos>"
    assert caught.value.param == "messages"


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages[0].missing.field }}",
        "{{ 'a' + messages[0].number }}",
        "{{ 1 // 0 }}",
        "{{ ''.__class__.__mro__ }}",
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    ],
)
def test_a_templates_fault_shows_no_source_and_no_exception(
    tokenizer: Tokenizer, source: str
) -> None:
    with pytest.raises(ChatError) as caught:
        ChatTemplate(source, tokenizer).render([{"role": "user", "content": "hi", "number": 1}])
    assert str(caught.value) == "the model's chat template cannot print these messages and tools"


def test_half_a_surrogate_pair_is_named_wherever_it_stands(template: ChatTemplate) -> None:
    talk = [{"role": "user", "content": "hi"}]
    for param, options in (
        ("tools[0].function.name", {"tools": [tool(name="\ud800")]}),
        ("chat_template_kwargs.a[1]", {"variables": {"a": ["", "\ud800"]}}),
    ):
        with pytest.raises(ChatError, match="half of a surrogate pair") as caught:
            template.render(talk, **options)
        assert caught.value.param == param


def test_deep_nesting_is_refused_wherever_it_stands(template: ChatTemplate) -> None:
    deep: object = "end"
    for _ in range(MAX_DEPTH + 1):
        deep = [deep]
    talk = [{"role": "user", "content": "hi"}]
    attempts: list[Callable[[], object]] = [
        lambda: template.render(weather({"a": deep})),
        lambda: template.render(weather(json.dumps({"a": deep}))),
        lambda: template.render(talk, tools=[tool(a=deep)]),
        lambda: template.render(talk, variables={"a": deep}),
    ]
    for attempt in attempts:
        with pytest.raises(ChatError, match=f"at most {MAX_DEPTH} levels"):
            attempt()


def test_nesting_up_to_the_bound_is_printed(template: ChatTemplate) -> None:
    deep: object = "end"
    for _ in range(MAX_DEPTH - 7):
        deep = {"a": deep}
    assert '<|"|>end<|"|>' in template.render(weather({"a": deep})).text


def test_a_rendering_that_looks_up_too_much_is_refused(
    template: ChatTemplate, monkeypatch: pytest.MonkeyPatch
) -> None:
    talk = [{"role": "user", "content": "hi"}] * 200
    template.render(talk)
    monkeypatch.setattr(sandbox, "MAX_STEPS", 500)
    with pytest.raises(ChatError, match="too long for the model's chat template"):
        template.render(talk)


def test_templates_render_in_several_threads_at_once(template: ChatTemplate) -> None:
    talks = [[{"role": "user", "content": f"<|turn>{n}"}] for n in range(40)]
    with ThreadPoolExecutor(4) as pool:
        prompts = list(pool.map(template.render, talks))
    assert [p.text for p in prompts] == [template.render(talk).text for talk in talks]
