"""Prometheus metrics of one app: what is counted, under which names and labels.

Its own registry, so two apps in one process do not meet. A fault here is logged and dropped, never raised: accounting
must not end a request. Labels are few and bounded; tokens are counted as the engine made them, pings never.
"""

from __future__ import annotations

import functools
import logging
from typing import TYPE_CHECKING, Any, ParamSpec

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, disable_created_metrics
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4, generate_latest

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

logger = logging.getLogger(__name__)

CONTENT_TYPE = CONTENT_TYPE_PLAIN_0_0_4
ENDPOINTS = ("chat.completions", "completions")
FINISH_REASONS = ("stop", "length", "tool_calls", "cancelled", "error")
UNMATCHED_ROUTE = "unmatched"

# vLLM's bucket edges (v1/metrics), so that dashboards can be compared.
TTFT_BUCKETS = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0),
    *(20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)
ITL_BUCKETS = (
    *(0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0),
    *(20.0, 40.0, 80.0),
)
LATENCY_BUCKETS = (
    *(0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0),
    *(240.0, 480.0, 960.0, 1920.0, 7680.0),
)
HTTP_BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)

P = ParamSpec("P")


def _harmless(method: Callable[P, None]) -> Callable[P, None]:
    """Log whatever `method` raises and go on: a wrong number is dropped, the stream is not."""

    @functools.wraps(method)
    def guarded(*args: P.args, **kwargs: P.kwargs) -> None:
        try:
            method(*args, **kwargs)
        except Exception:
            logger.exception("a metric was dropped")

    return guarded


def _number(facts: Callable[[], Mapping[str, Any]], name: str) -> float:
    return float(facts().get(name, 0))


class Metrics:
    """Counters, gauges and histograms; every method is safe to call from the request path."""

    def __init__(self) -> None:
        # Process-wide in prometheus_client: without it every counter gets a second `_created` series.
        disable_created_metrics()  # type: ignore[no-untyped-call]
        self.registry = CollectorRegistry()
        self._requests = self._counter(
            "requests", "Answered requests.", ("endpoint", "finish_reason", "status")
        )
        for endpoint in ENDPOINTS:
            for reason, status in (
                ("stop", 200),
                ("length", 200),
                ("cancelled", 499),
                ("error", 500),
            ):
                self._requests.labels(endpoint, reason, str(status))
        self._prompt_tokens = self._counter("prompt_tokens", "Prompt tokens read.", ("source",))
        for source in ("computed", "cached"):
            self._prompt_tokens.labels(source)
        self._generation_tokens = self._counter(
            "generation_tokens", "Tokens made, the ending ones too."
        )
        self._time_to_first_token = self._histogram(
            "time_to_first_token", "Arrival to first token.", TTFT_BUCKETS
        )
        self._inter_token = self._histogram(
            "inter_token_latency", "Time between two tokens.", ITL_BUCKETS
        )
        self._whole = self._histogram(
            "e2e_request_latency", "Arrival to last token.", LATENCY_BUCKETS
        )
        self._queue = self._histogram("request_queue_time", "Arrival to engine.", LATENCY_BUCKETS)
        self._prefill = self._histogram(
            "request_prefill_time", "The engine reading the prompt.", LATENCY_BUCKETS
        )
        self._decode = self._histogram(
            "request_decode_time", "The engine making tokens.", LATENCY_BUCKETS
        )
        self._http = self._counter("http_requests", "HTTP requests.", ("method", "route", "status"))
        self._http_seconds = Histogram(
            "torchtpu_http_request_duration_seconds",
            "HTTP request to last byte.",
            ("route",),
            registry=self.registry,
            buckets=HTTP_BUCKETS,
        )
        self._http_in_flight = self._gauge("http_requests_in_flight", "HTTP requests open.")
        self._load_seconds = self._gauge("model_load_seconds", "Seconds the weights took to load.")
        self._warmup_seconds = self._gauge("model_warmup_seconds", "Seconds the warmup took.")
        self._build = Gauge(
            "torchtpu_build_info",
            "Constant 1; the labels say what runs.",
            ("version", "device", "dtype", "model"),
            registry=self.registry,
        )

    def watch(
        self,
        *,
        running: Callable[[], float],
        waiting: Callable[[], float],
        cache_usage: Callable[[], float],
        engine: Callable[[], Mapping[str, Any]],
    ) -> None:
        """Gauges that are read at the scrape, so that they cannot drift from the truth."""
        self._gauge("requests_running", "Requests in the engine.").set_function(running)
        self._gauge("requests_waiting", "Requests in the queue.").set_function(waiting)
        self._gauge("kv_cache_usage_ratio", "Positions in use over context.").set_function(
            cache_usage
        )
        # What only an engine with compiled programs counts; 0 elsewhere.
        for fact, text in (
            ("launches", "Launches of compiled programs."),
            ("host_reads", "Results of programs read by the host."),
            ("decoded_tokens", "Tokens that programs made, those thrown away included."),
            ("compilations", "Programs compiled since the start."),
        ):
            gauge = self._gauge(f"engine_{fact}", text)
            gauge.set_function(functools.partial(_number, engine, fact))

    @_harmless
    def loaded(self, info: Mapping[str, str], load_seconds: float, warmup_seconds: float) -> None:
        """The model is ready; `info` has the four labels of the build gauge."""
        self._load_seconds.set(load_seconds)
        self._warmup_seconds.set(warmup_seconds)
        self._build.labels(**info).set(1)

    @_harmless
    def answered(self, endpoint: str, finish_reason: str, status: int) -> None:
        """One request to an inference endpoint ended, however it did."""
        self._requests.labels(endpoint, finish_reason, str(status)).inc()

    @_harmless
    def prompt_read(self, computed: int, cached: int = 0) -> None:
        """The engine read a prompt of `computed + cached` tokens."""
        self._prompt_tokens.labels("computed").inc(computed)
        self._prompt_tokens.labels("cached").inc(cached)

    @_harmless
    def tokens_made(self, count: int) -> None:
        """The engine made `count` tokens."""
        self._generation_tokens.inc(count)

    @_harmless
    def first_token(self, seconds: float) -> None:
        """Seconds from arrival to the first token of an answer."""
        self._time_to_first_token.observe(seconds)

    @_harmless
    def next_tokens(self, count: int, seconds: float) -> None:
        """`count` tokens came `seconds` after the ones before them."""
        for _ in range(count):
            self._inter_token.observe(seconds / count)

    @_harmless
    def stages(self, *, queue: float, prefill: float, decode: float, whole: float) -> None:
        """The seconds of one answered request by stage."""
        self._queue.observe(queue)
        self._prefill.observe(prefill)
        self._decode.observe(decode)
        self._whole.observe(whole)

    @_harmless
    def http_opened(self) -> None:
        """An HTTP request came in."""
        self._http_in_flight.inc()

    @_harmless
    def http_closed(self, method: str, route: str, status: int, seconds: float) -> None:
        """An HTTP request ended; `route` is a route's own path or `UNMATCHED_ROUTE`, never what was typed."""
        self._http_in_flight.dec()
        self._http.labels(method, route, str(status)).inc()
        self._http_seconds.labels(route).observe(seconds)

    def exposition(self) -> bytes:
        """The text a scrape gets; its content type is `CONTENT_TYPE`."""
        return generate_latest(self.registry)

    def _counter(self, name: str, text: str, labels: tuple[str, ...] = ()) -> Counter:
        return Counter(f"torchtpu_{name}", text, labels, registry=self.registry)

    def _gauge(self, name: str, text: str) -> Gauge:
        return Gauge(f"torchtpu_{name}", text, registry=self.registry)

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
        return Histogram(f"torchtpu_{name}_seconds", text, registry=self.registry, buckets=buckets)
