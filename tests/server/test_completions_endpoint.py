"""POST /v1/completions: prompts of four shapes, <bos>, limits, several choices in order."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import pytest

from tests.fakes import Gate
from tests.server.live_server import assert_openai_error, eventually, payloads

if TYPE_CHECKING:
    from server.engine import Job
    from tests.server.live_server import Live

pytest_plugins = ["tests.server.http_fixtures"]

BOS = 2


def test_text_gets_one_bos_and_typed_markers_are_markers(live: Live) -> None:
    ids = tuple(live.ids("Once"))
    for prompt, expected in [
        ("Once", (BOS, *ids)),
        ("<bos>Once", (BOS, *ids)),
        ("<|turn>Once", (BOS, 105, *ids)),
        ("", (BOS,)),
    ]:
        live.engine.calls.clear()
        assert live.complete(prompt).status_code == 200
        assert live.engine.calls[0].token_ids == expected
    live.engine.calls.clear()
    live.complete("Once", add_special_tokens=False)
    assert live.engine.calls[0].token_ids == ids


def test_token_ids_are_taken_as_they_are(live: Live) -> None:
    live.complete([5, 6, 7])
    assert live.engine.calls[0].token_ids == (5, 6, 7)


@pytest.mark.parametrize(
    "prompt", [[99_999_999], [-1], [[5], [99_999_999]], [2**63], [[1, 2], [3, -4]]]
)
def test_an_id_outside_the_vocabulary_is_refused_by_id(live: Live, prompt: Any) -> None:
    message = assert_openai_error(live.complete(prompt), 400, param="prompt")
    flat = prompt[-1] if isinstance(prompt[-1], list) else prompt
    assert str(flat[-1]) in message
    assert live.engine.calls == []


def test_the_limit_is_sixteen_unless_said(live: Live) -> None:
    live.script("a long text " * 10)
    answer = live.complete().json()
    assert answer["usage"]["completion_tokens"] == 16
    assert answer["choices"][0]["finish_reason"] == "length"


def test_the_default_limit_shrinks_to_what_fits(live: Live) -> None:
    live.complete([5] * 250)
    assert live.engine.calls[0].max_new == 6


@pytest.mark.parametrize("stream", [False, True])
def test_no_token_is_a_legal_wish_and_needs_no_engine(live: Live, stream: bool) -> None:
    response = live.complete([5, 6], max_tokens=0, stream=stream)
    if stream:
        choices = [chunk["choices"][0] for chunk in payloads(response.text)]
        assert [(c["text"], c["finish_reason"]) for c in choices] == [("", "length")]
    else:
        answer = response.json()
        assert answer["choices"][0]["text"] == ""
        assert answer["choices"][0]["finish_reason"] == "length"
        assert (answer["usage"]["prompt_tokens"], answer["usage"]["completion_tokens"]) == (2, 0)
    assert live.engine.calls == []


@pytest.mark.parametrize(
    ("prompt", "fields"),
    [([5] * 256, {}), ([5] * 255, {"max_tokens": 2}), ([5] * 257, {"max_tokens": 0})],
)
def test_what_does_not_fit_is_refused(live: Live, prompt: list[int], fields: Any) -> None:
    response = live.complete(prompt, **fields)
    assert_openai_error(response, 400, param="prompt", code="context_length_exceeded")
    assert response.json()["error"]["n_prompt_tokens"] == len(prompt)
    assert live.engine.calls == []


def test_several_prompts_are_several_choices_run_in_order(live: Live) -> None:
    live.engine.play = lambda ids: [ids[-1], ids[-1]]
    answer = live.complete([[300], [301, 302], [303]]).json()
    decode = live.tokenizer.decode
    assert [choice["text"] for choice in answer["choices"]] == [
        decode([300, 300]),
        decode([302, 302]),
        decode([303, 303]),
    ]
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2]
    usage = answer["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (4, 9)
    assert answer["timings"]["prompt_ms"] == 750.0
    assert [call.token_ids for call in live.engine.calls] == [(300,), (301, 302), (303,)]


def test_several_prompts_stream_one_after_the_other(live: Live) -> None:
    live.engine.play = lambda ids: [ids[-1]]
    response = live.complete([[300], [301]], stream=True, stream_options={"include_usage": True})
    *chunks, usage = payloads(response.text)
    seen = [(c["choices"][0]["index"], c["choices"][0]["finish_reason"]) for c in chunks]
    assert seen == [(0, None), (0, "stop"), (1, None), (1, "stop")]
    assert usage["choices"] == []
    assert usage["usage"]["completion_tokens"] == 4
    assert [c.get("timings") for c in chunks] == [None] * 4
    assert usage["timings"]["predicted_n"] == 4


def test_a_failure_in_a_later_choice_fails_the_whole_answer(live: Live) -> None:
    live.engine.play = lambda ids: [RuntimeError("lost")] if ids[0] == 301 else [300]
    assert_openai_error(live.complete([[300], [301], [302]]), 500)
    assert len(live.engine.calls) == 2
    chunks = payloads(live.complete([[300], [301], [302]], stream=True).text)
    assert chunks[-1]["error"]["type"] == "server_error"


def test_others_get_their_turn_between_the_prompts_of_a_long_list(live: Live) -> None:
    gate = Gate()
    live.engine.play = lambda ids: [gate, 300] if ids[0] == 300 else [301]
    with ThreadPoolExecutor(2) as pool:
        listed = pool.submit(live.complete, [[300], [302], [303]])
        gate.wait_until_reached()
        single = pool.submit(live.complete, [304])
        eventually(lambda: live.service.worker.waiting == 1, "the single prompt waits")
        gate.open()
        assert len(listed.result().json()["choices"]) == 3
        assert single.result().status_code == 200
    assert [call.token_ids for call in live.engine.calls] == [(300,), (304,), (302,), (303,)]


def test_the_later_prompts_of_a_list_are_admitted_with_the_first(
    live: Live, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker = live.service.worker
    submit, admitted = worker.submit, []

    def watched(job: Job, **fields: bool) -> None:
        admitted.append(fields["admitted"])
        submit(job, **fields)

    monkeypatch.setattr(worker, "submit", watched)
    assert live.complete([[300], [301], [302]]).status_code == 200
    assert admitted == [False, True, True]


def test_prompt_lists_are_bounded(live: Live) -> None:
    assert_openai_error(live.complete([[5]] * 257), 400, param="prompt")


def test_stop_strings_end_a_completion(live: Live) -> None:
    live.script("one STOP two")
    choice = live.complete(stop=["STOP"]).json()["choices"][0]
    assert (choice["text"], choice["finish_reason"]) == ("one ", "stop")


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"echo": True}, "echo"),
        ({"suffix": "end"}, "suffix"),
        ({"best_of": 2}, "best_of"),
        ({"n": 2}, "n"),
        ({"logprobs": 0}, "logprobs"),
        ({"logprobs": 5}, "logprobs"),
        ({"logprobs": True}, "logprobs"),
        ({"temperature": 1}, "temperature"),
    ],
)
def test_what_is_not_honoured_is_refused_by_name(live: Live, fields: Any, param: str) -> None:
    assert_openai_error(live.complete(**fields), 400, param=param, code="unsupported")
