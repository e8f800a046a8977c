"""Metrics that count what happened and never harm a request."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from prometheus_client.parser import text_string_to_metric_families

from server.metrics import ITL_BUCKETS, LATENCY_BUCKETS, TTFT_BUCKETS, Metrics
from tests.fakes import Gate
from tests.server.live_server import eventually, payloads

if TYPE_CHECKING:
    from collections.abc import Callable

    import pytest

    from tests.server.live_server import Live

pytest_plugins = ["tests.server.http_fixtures"]


def test_a_scrape_is_prometheus_text_by_the_book(live: Live) -> None:
    live.chat()
    response = live.http.get("/metrics", follow_redirects=False)
    assert response.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
    families = list(text_string_to_metric_families(response.text))
    names = {family.name for family in families}
    assert all(re.fullmatch(r"torchtpu_[a-z0-9_]+", name) for name in names)
    # Base units, no colons, `_total` on every counter and on nothing else.
    for family in families:
        assert family.documentation
        for sample in family.samples:
            if family.type == "counter":
                assert sample.name == f"{family.name}_total"
            else:
                assert not sample.name.endswith(("_total", "_created"))
    assert {
        "torchtpu_requests_running",
        "torchtpu_requests_waiting",
        "torchtpu_requests",
        "torchtpu_prompt_tokens",
        "torchtpu_generation_tokens",
        "torchtpu_time_to_first_token_seconds",
        "torchtpu_inter_token_latency_seconds",
        "torchtpu_e2e_request_latency_seconds",
        "torchtpu_request_queue_time_seconds",
        "torchtpu_request_prefill_time_seconds",
        "torchtpu_request_decode_time_seconds",
        "torchtpu_http_requests",
        "torchtpu_http_request_duration_seconds",
        "torchtpu_http_requests_in_flight",
        "torchtpu_kv_cache_usage_ratio",
        "torchtpu_build_info",
        "torchtpu_model_load_seconds",
    } <= names


def test_totals_equal_the_sum_of_the_usages(live: Live) -> None:
    def totals() -> tuple[float, float, float, float, float]:
        return (
            live.metric("torchtpu_prompt_tokens_total"),
            live.metric("torchtpu_generation_tokens_total"),
            live.metric("torchtpu_requests_total", status="200"),
            live.metric("torchtpu_time_to_first_token_seconds_count"),
            live.metric("torchtpu_e2e_request_latency_seconds_count"),
        )

    before = totals()
    usages: list[dict[str, Any]] = []
    for text in ("a", "some words", "one STOP two three four"):
        live.script(text)
        usages.append(live.chat(stop="STOP").json()["usage"])
        chunks = payloads(
            live.chat(stop="STOP", stream=True, stream_options={"include_usage": True}).text
        )
        usages.append(chunks[-1]["usage"])
    usages.append(live.complete([[300], [301]]).json()["usage"])
    live.chat(temperature=1)
    live.complete([-1])
    after = totals()
    assert after[0] - before[0] == sum(usage["prompt_tokens"] for usage in usages)
    assert after[1] - before[1] == sum(usage["completion_tokens"] for usage in usages)
    assert [after[i] - before[i] for i in (2, 3, 4)] == [7, 7, 7]


def test_outcomes_are_counted_by_endpoint_reason_and_status(live: Live) -> None:
    def count(**labels: str) -> float:
        return live.metric("torchtpu_requests_total", **labels)

    chat = {"endpoint": "chat.completions"}
    wanted = [
        {**chat, "finish_reason": "stop", "status": "200"},
        {**chat, "finish_reason": "length", "status": "200"},
        {**chat, "finish_reason": "error", "status": "400"},
        {**chat, "finish_reason": "error", "status": "500"},
        {"endpoint": "completions", "finish_reason": "error", "status": "404"},
    ]
    before = [count(**labels) for labels in wanted]
    live.chat()
    live.chat(max_tokens=1)
    live.chat(n=0)
    live.complete(model="other")
    live.engine.script = [RuntimeError("lost")]
    live.chat()
    assert [count(**labels) for labels in wanted] == [value + 1 for value in before]


def test_cancelled_outcomes_exist_before_the_first_one(serve: Callable[..., Live]) -> None:
    text = serve().http.get("/metrics").text
    for endpoint in ("chat.completions", "completions"):
        line = f'torchtpu_requests_total{{endpoint="{endpoint}",finish_reason="cancelled",status="499"}} 0.0'
        assert line in text


def test_comments_are_no_tokens(serve: Callable[..., Live]) -> None:
    live = serve(ping_seconds=0.05)
    gate = Gate()
    live.script(gate, "one")
    connection = live.open_chat(stream=True)
    data = b""
    while data.count(b": ping") < 3:
        data += connection.recv(65536)
    assert live.metric("torchtpu_time_to_first_token_seconds_count") == 0
    assert live.metric("torchtpu_generation_tokens_total") == 0
    gate.open()
    while connection.recv(65536):
        pass
    connection.close()
    eventually(lambda: not live.service.active, "the exchange is over")
    assert live.metric("torchtpu_time_to_first_token_seconds_count") == 1
    made = len(live.ids("one")) + 1
    assert live.metric("torchtpu_generation_tokens_total") == made
    assert live.metric("torchtpu_inter_token_latency_seconds_count") == made - 1


def test_a_wrong_number_is_logged_and_dropped(caplog: pytest.LogCaptureFixture) -> None:
    metrics = Metrics()
    metrics.prompt_read(7, cached=-5)
    metrics.tokens_made(-1)
    metrics.next_tokens(1, float("nan"))
    assert caplog.text.count("a metric was dropped") == 2
    assert "torchtpu_generation_tokens_total 0.0" in metrics.exposition().decode()


def test_a_fault_in_metrics_reaches_no_request(live: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise RuntimeError("broken")

    for name in ("_requests", "_generation_tokens", "_prompt_tokens", "_http", "_queue"):
        monkeypatch.setattr(live.service.metrics, name, None)
    monkeypatch.setattr(live.service.metrics._time_to_first_token, "observe", broken)
    assert live.chat().status_code == 200
    assert payloads(live.chat(stream=True).text)


def test_unknown_paths_share_one_label(live: Live) -> None:
    def unmatched() -> float:
        return live.metric("torchtpu_http_requests_total", route="unmatched", status="404")

    live.http.get("/nothing")
    eventually(lambda: live.metric("torchtpu_http_requests_in_flight") == 0, "all is counted")
    before = unmatched()
    for number in range(50):
        live.http.get(f"/nothing/{number}")
    # An HTTP request is counted after its last byte, which the client may see first.
    eventually(lambda: unmatched() == before + 50, "all are counted under one label")
    assert "/nothing" not in live.http.get("/metrics").text


def test_the_gauges_show_what_runs_and_what_waits(live: Live) -> None:
    gate = Gate()
    live.script("one", gate)
    first = live.open_chat()
    gate.wait_until_reached()
    second = live.open_chat()
    eventually(lambda: live.service.worker.waiting == 1, "one waits")
    text = live.http.get("/metrics").text
    assert "torchtpu_requests_running 1.0" in text
    assert "torchtpu_requests_waiting 1.0" in text
    prompt = len(live.engine.calls[0].token_ids)
    used = (prompt + len(live.ids("one"))) / 256
    assert f"torchtpu_kv_cache_usage_ratio {used}" in text
    gate.open()
    for connection in (first, second):
        while connection.recv(65536):
            pass
        connection.close()


def test_bucket_edges_are_those_of_vllm() -> None:
    assert (len(TTFT_BUCKETS), TTFT_BUCKETS[0], TTFT_BUCKETS[-1]) == (22, 0.001, 2560.0)
    assert (len(ITL_BUCKETS), ITL_BUCKETS[0], ITL_BUCKETS[-1]) == (19, 0.01, 80.0)
    assert (len(LATENCY_BUCKETS), LATENCY_BUCKETS[0], LATENCY_BUCKETS[-1]) == (21, 0.3, 7680.0)
    for buckets in (TTFT_BUCKETS, ITL_BUCKETS, LATENCY_BUCKETS):
        assert list(buckets) == sorted(set(buckets))


def test_the_build_is_an_info_gauge(live: Live) -> None:
    line = (
        'torchtpu_build_info{device="cpu",dtype="bfloat16",model="tiny-gemma",version="0.1.0"} 1.0'
    )
    assert line in live.http.get("/metrics").text
