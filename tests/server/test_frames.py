"""Whole transcripts: every byte a client gets, in order, and the whole answer beside it."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import httpx
import pytest

from tests.fakes import Gate
from tests.server.live_server import SAY_HI, content_of, payloads

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.server.live_server import Live

pytest_plugins = ["tests.server.http_fixtures"]

TIMINGS = {
    "queue_ms",
    "prompt_n",
    "prompt_ms",
    "prompt_per_second",
    "predicted_n",
    "predicted_ms",
    "predicted_per_second",
}


def stream(live: Live, path: str, body: dict[str, Any]) -> tuple[httpx.Headers, str]:
    """Headers and the exact text of a streamed answer."""
    raw = live.send_raw("POST", path, json.dumps({"stream": True, **body}).encode())
    head, _, chunked = raw.partition(b"\r\n\r\n")
    status, *lines = head.decode().split("\r\n")
    assert status == "HTTP/1.1 200 OK"
    headers = httpx.Headers(dict(line.split(": ", 1) for line in lines))
    text, rest = b"", chunked
    while rest:
        size, _, rest = rest.partition(b"\r\n")
        text, rest = text + rest[: int(size, 16)], rest[int(size, 16) + 2 :]
    return headers, text.decode()


def normal(text: str) -> str:
    """The transcript with what changes from run to run made plain."""
    chunks = payloads(text)
    first = chunks[0]
    text = text.replace(first["id"], "ID").replace(f'"created":{first["created"]}', '"created":0')
    for chunk in chunks:
        if "timings" in chunk:
            assert chunk["timings"].keys() == TIMINGS
            shown = json.dumps(chunk["timings"], separators=(",", ":"))
            text = text.replace(shown, "TIMINGS")
    return text


def test_a_chat_stream_byte_for_byte(live: Live) -> None:
    live.script((*live.ids("Hello"),), (*live.ids(" ü"),))
    headers, text = stream(live, "/v1/chat/completions", {"messages": SAY_HI})
    head = (
        '{"id":"ID","object":"chat.completion.chunk","created":0,"model":"tiny-gemma",'
        '"system_fingerprint":"torchtpu_rs-greedy","choices":[{"index":0,"delta":'
    )
    assert normal(text) == (
        f'data: {head}{{"role":"assistant","content":""}},"logprobs":null,"finish_reason":null}}]}}\n\n'
        f'data: {head}{{"content":"Hello"}},"logprobs":null,"finish_reason":null}}]}}\n\n'
        f'data: {head}{{"content":" ü"}},"logprobs":null,"finish_reason":null}}]}}\n\n'
        f'data: {head}{{}},"logprobs":null,"finish_reason":"stop"}}],"timings":TIMINGS}}\n\n'
        "data: [DONE]\n\n"
    )
    assert headers["content-type"] == "text/event-stream; charset=utf-8"
    assert headers["cache-control"] == "no-cache"
    assert headers["x-accel-buffering"] == "no"
    assert "content-encoding" not in headers


def test_a_chat_stream_with_usage_byte_for_byte(live: Live) -> None:
    live.script((*live.ids("Hi"),))
    made = len(live.ids("Hi")) + 1
    body = {"messages": SAY_HI, "stream_options": {"include_usage": True}}
    _, text = stream(live, "/v1/chat/completions", body)
    head = (
        '{"id":"ID","object":"chat.completion.chunk","created":0,"model":"tiny-gemma",'
        '"system_fingerprint":"torchtpu_rs-greedy","choices":['
    )
    prompt = len(live.engine.calls[0].token_ids)
    usage = (
        f'{{"prompt_tokens":{prompt},"completion_tokens":{made},"total_tokens":{prompt + made},'
        '"prompt_tokens_details":{"cached_tokens":0},"completion_tokens_details":{"reasoning_tokens":0}}'
    )
    null = '"usage":null}\n\n'
    assert normal(text) == (
        f'data: {head}{{"index":0,"delta":{{"role":"assistant","content":""}},"logprobs":null,"finish_reason":null}}],{null}'
        f'data: {head}{{"index":0,"delta":{{"content":"Hi"}},"logprobs":null,"finish_reason":null}}],{null}'
        f'data: {head}{{"index":0,"delta":{{}},"logprobs":null,"finish_reason":"stop"}}],{null}'
        f'data: {head}],"usage":{usage},"timings":TIMINGS}}\n\n'
        "data: [DONE]\n\n"
    )


def test_a_completion_stream_byte_for_byte(live: Live) -> None:
    live.script((*live.ids("upon"),), (*live.ids(" a"),))
    _, text = stream(live, "/v1/completions", {"prompt": "Once"})
    head = (
        '{"id":"ID","object":"text_completion","created":0,"model":"tiny-gemma",'
        '"system_fingerprint":"torchtpu_rs-greedy","choices":[{"index":0,"text":'
    )
    assert normal(text) == (
        f'data: {head}"upon","logprobs":null,"finish_reason":null}}]}}\n\n'
        f'data: {head}" a","logprobs":null,"finish_reason":null}}]}}\n\n'
        f'data: {head}"","logprobs":null,"finish_reason":"stop"}}],"timings":TIMINGS}}\n\n'
        "data: [DONE]\n\n"
    )


def test_a_whole_chat_answer_has_every_key_of_the_specification(live: Live) -> None:
    live.script("Hello")
    answer = live.chat().json()
    made, prompt = len(live.ids("Hello")) + 1, len(live.engine.calls[0].token_ids)
    assert answer.pop("id").startswith("chatcmpl-")
    assert isinstance(answer.pop("created"), int)
    timings = answer.pop("timings")
    assert timings.keys() == TIMINGS
    assert (timings["prompt_n"], timings["prompt_ms"]) == (prompt, 250.0)
    assert timings["prompt_per_second"] == pytest.approx(prompt / 0.25, abs=0.01)
    assert (timings["predicted_n"], timings["predicted_ms"]) == (made, 500.0)
    assert timings["predicted_per_second"] == pytest.approx((made - 1) / 0.5, abs=0.01)
    assert answer == {
        "object": "chat.completion",
        "model": "tiny-gemma",
        "system_fingerprint": "torchtpu_rs-greedy",
        "choices": [
            {
                "index": 0,
                "message": {"role": "assistant", "content": "Hello", "refusal": None},
                "logprobs": None,
                "finish_reason": "stop",
            }
        ],
        "usage": {
            "prompt_tokens": prompt,
            "completion_tokens": made,
            "total_tokens": prompt + made,
            "prompt_tokens_details": {"cached_tokens": 0},
            "completion_tokens_details": {"reasoning_tokens": 0},
        },
    }


def test_a_streamed_call_names_itself_once_and_its_pieces_join_to_json(live: Live) -> None:
    live.script(48, "call:weather{city:", 52, "Oslo", 52, "}", 49, 50)
    tool = {"type": "function", "function": {"name": "weather", "parameters": {}}}
    _, text = stream(live, "/v1/chat/completions", {"messages": SAY_HI, "tools": [tool]})
    chunks = payloads(text)
    deltas = [
        call
        for chunk in chunks
        for choice in chunk["choices"]
        for call in choice["delta"].get("tool_calls", [])
    ]
    assert deltas[0].pop("id").startswith("call_")
    assert deltas == [
        {"index": 0, "type": "function", "function": {"name": "weather", "arguments": ""}},
        {"index": 0, "function": {"arguments": '{"city": "Oslo"}'}},
    ]
    assert chunks[-1]["choices"][0]["finish_reason"] == "tool_calls"
    assert content_of(chunks) == ""


def test_a_whole_call_has_null_content(live: Live) -> None:
    live.script(48, "call:weather{city:", 52, "Oslo", 52, "}", 49, 50)
    tool = {"type": "function", "function": {"name": "weather", "parameters": {}}}
    choice = live.chat(tools=[tool]).json()["choices"][0]
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"]["content"] is None
    call = choice["message"]["tool_calls"][0]
    assert call.pop("id").startswith("call_")
    assert call == {
        "type": "function",
        "function": {"name": "weather", "arguments": '{"city": "Oslo"}'},
    }


@pytest.mark.parametrize("text", ["Hello there.", "a b  c\n\n", "naïve 🦀 日本", "one STOP two"])
def test_stream_and_whole_say_the_same(live: Live, text: str) -> None:
    live.script(text)
    fields = {"stop": "STOP"}
    whole = live.chat(**fields).json()
    streamed = payloads(
        live.chat(stream=True, stream_options={"include_usage": True}, **fields).text
    )
    assert content_of(streamed) == whole["choices"][0]["message"]["content"]
    assert streamed[-1]["usage"] == whole["usage"]
    assert streamed[-2]["choices"][0]["finish_reason"] == whole["choices"][0]["finish_reason"]
    assert {chunk["id"] for chunk in streamed} == {streamed[0]["id"]}
    whole_text = live.complete(**fields).json()["choices"][0]["text"]
    pieces = payloads(live.complete(stream=True, **fields).text)
    assert "".join(chunk["choices"][0]["text"] for chunk in pieces) == whole_text


def test_tokens_without_visible_text_make_no_chunk_but_count(live: Live) -> None:
    # Seven tokens, of which a control token and the end show nothing.
    ids = live.ids("Hello there")[:5]
    live.script(*ids, 98, 106)
    response = live.chat(stream=True, stream_options={"include_usage": True})
    chunks = payloads(response.text)
    assert chunks[-1]["usage"]["completion_tokens"] == 7
    assert live.chat().json()["usage"]["completion_tokens"] == 7
    assert all(chunk["choices"][0]["delta"].get("content") for chunk in chunks[1:-2])


def test_no_frame_holds_half_a_character(live: Live) -> None:
    crab = [live.tokenizer.token_id(f"<0x{byte:02X}>") for byte in "🦀".encode()]
    live.script(*[i for i in crab if i is not None], "!")
    _, text = stream(live, "/v1/chat/completions", {"messages": SAY_HI})
    assert content_of(payloads(text)) == "🦀!"
    assert "\ufffd" not in text


def test_silence_is_filled_with_comments_and_speech_is_not(serve: Callable[..., Live]) -> None:
    live = serve(ping_seconds=0.05)
    gate = Gate()
    live.script("one", gate, "two", "three")
    with live.http.stream(
        "POST", "/v1/chat/completions", json={"messages": SAY_HI, "stream": True}
    ) as response:
        text = ""
        for piece in response.iter_text():
            text += piece
            if text.count(": ping\n\n") >= 3:
                gate.open()
    before, _, after = text.rpartition(": ping\n\n")
    assert content_of(payloads(before + after)) == "onetwothree"
    assert "ping" not in after
    assert content_of([json.loads(line[6:]) for line in after.split("\n\n")[:-2]]) == "twothree"


def test_headers_go_out_with_the_first_ping_while_the_prompt_is_read(
    serve: Callable[..., Live],
) -> None:
    live = serve(ping_seconds=0.05)
    gate = Gate()
    live.script(gate, "one")
    with live.http.stream(
        "POST", "/v1/chat/completions", json={"messages": SAY_HI, "stream": True}
    ) as response:
        assert response.status_code == 200
        lines = response.iter_lines()
        assert next(lines) == ": ping"
        gate.open()
        rest = [line for line in lines if line.startswith("data: ")]
    assert json.loads(rest[0][6:])["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert rest[-1] == "data: [DONE]"
