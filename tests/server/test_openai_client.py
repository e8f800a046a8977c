"""The real openai-python client over a real socket: what its users see."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import openai
import pytest

from tests.fakes import Gate
from tests.server.live_server import eventually

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tests.server.live_server import Live

pytest_plugins = ["tests.server.http_fixtures"]

MODEL = "tiny-gemma"
HI: Any = [{"role": "user", "content": "Say hi."}]
WEATHER: Any = {
    "type": "function",
    "function": {"name": "weather", "parameters": {"type": "object", "properties": {}}},
}


@pytest.fixture
def client(live: Live) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{live.url}/v1", api_key="any", max_retries=2) as made:
        yield made


def test_a_chat_answer(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(model=MODEL, messages=HI, temperature=0)
    assert answer.choices[0].message.content == "Hello there."
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage is not None
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens
    assert answer.system_fingerprint == "torchtpu_rs-greedy"
    assert answer._request_id
    assert answer.model_extra is not None
    assert answer.model_extra["timings"]["prompt_ms"] == 250.0


def test_a_chat_stream_with_usage(client: openai.OpenAI) -> None:
    stream = client.chat.completions.create(
        model=MODEL, messages=HI, stream=True, stream_options={"include_usage": True}
    )
    chunks = list(stream)
    assert chunks[0].choices[0].delta.role == "assistant"
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert text == "Hello there."
    assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] == "stop"
    assert chunks[-1].choices == []
    assert chunks[-1].usage is not None
    assert len({(c.id, c.created, c.model) for c in chunks}) == 1


def test_the_stream_helper_accumulates_the_same(client: openai.OpenAI) -> None:
    with client.chat.completions.stream(model=MODEL, messages=HI) as stream:
        final = stream.get_final_completion()
    assert final.choices[0].message.content == "Hello there."


def test_a_completion_streamed_and_whole(client: openai.OpenAI) -> None:
    whole = client.completions.create(model=MODEL, prompt="Once", max_tokens=50)
    pieces = client.completions.create(model=MODEL, prompt="Once", max_tokens=50, stream=True)
    assert "".join(p.choices[0].text for p in pieces) == whole.choices[0].text == "Hello there."


def test_a_tool_call_and_its_answer(client: openai.OpenAI, live: Live) -> None:
    live.script(48, "call:weather{city:", 52, "Oslo", 52, "}", 49, 50)
    message = (
        client.chat.completions.create(model=MODEL, messages=HI, tools=[WEATHER]).choices[0].message
    )
    assert message.tool_calls is not None
    call: Any = message.tool_calls[0]
    assert (call.function.name, call.function.arguments) == ("weather", '{"city": "Oslo"}')
    live.script("It is 4 C.")
    answer = client.chat.completions.create(
        model=MODEL,
        messages=[*HI, message, {"role": "tool", "tool_call_id": call.id, "content": "4 C"}],  # type: ignore[list-item]
        tools=[WEATHER],
    )
    assert answer.choices[0].message.content == "It is 4 C."


def test_models(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == [MODEL]
    assert client.models.retrieve(MODEL).owned_by == "torchtpu_rs"
    with pytest.raises(openai.NotFoundError) as caught:
        client.models.retrieve("other")
    assert caught.value.code == "model_not_found"


def test_refusals_become_the_clients_own_classes(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="greedy") as bad:
        client.chat.completions.create(model=MODEL, messages=HI, temperature=0.7)
    assert (bad.value.param, bad.value.type) == ("temperature", "invalid_request_error")
    with pytest.raises(openai.BadRequestError, match="maximum context length") as long:
        client.completions.create(model=MODEL, prompt=[5] * 300)
    assert long.value.code == "context_length_exceeded"
    with pytest.raises(openai.NotFoundError):
        client.chat.completions.create(model="other", messages=HI)


def test_a_500_is_asked_for_once(client: openai.OpenAI, live: Live) -> None:
    live.engine.script = [RuntimeError("lost")]
    with pytest.raises(openai.InternalServerError):
        client.chat.completions.create(model=MODEL, messages=HI)
    assert len(live.engine.calls) == 1


def test_a_crash_in_a_stream_raises_in_the_client(client: openai.OpenAI, live: Live) -> None:
    live.engine.script = [*live.ids("one"), RuntimeError("lost")]
    stream = client.chat.completions.create(model=MODEL, messages=HI, stream=True)
    with pytest.raises(openai.APIError, match="The engine failed"):
        list(stream)


def test_closing_a_stream_frees_the_engine(client: openai.OpenAI, live: Live) -> None:
    gate = Gate()
    live.script("one", gate, "two")
    stream = client.chat.completions.create(model=MODEL, messages=HI, stream=True)
    next(iter(stream))
    gate.wait_until_reached()
    stream.close()
    eventually(lambda: not live.service.active, "the exchange is over")
    gate.open()
    live.script("next")
    answer = client.chat.completions.create(model=MODEL, messages=HI)
    assert answer.choices[0].message.content == "next"
    assert live.engine.finishes[0] == "cancelled"


def test_comments_do_not_disturb_the_client(serve: Callable[..., Live]) -> None:
    live = serve(ping_seconds=0.05)
    gate = Gate()
    live.script(gate, "one")
    with openai.OpenAI(base_url=f"{live.url}/v1", api_key="any") as client:
        stream = client.chat.completions.create(model=MODEL, messages=HI, stream=True)
        gate.open()
        assert "".join(c.choices[0].delta.content or "" for c in stream) == "one"


def test_a_wrong_key_is_an_authentication_error(serve: Callable[..., Live]) -> None:
    live = serve(api_key="right")
    with (
        openai.OpenAI(base_url=f"{live.url}/v1", api_key="wrong") as client,
        pytest.raises(openai.AuthenticationError) as caught,
    ):
        client.models.list()
    assert caught.value.code == "invalid_api_key"


async def _answers(url: str) -> list[str]:
    import asyncio

    async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="any") as client:

        async def ask() -> str:
            answer = await client.chat.completions.create(model=MODEL, messages=HI)
            return answer.choices[0].message.content or ""

        return await asyncio.gather(*[ask() for _ in range(8)])


def test_the_asynchronous_client(live: Live) -> None:
    import asyncio

    assert asyncio.run(_answers(live.url)) == ["Hello there."] * 8
