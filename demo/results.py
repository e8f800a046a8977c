"""What the demo's tools answer, typed: a model for each, with its text for people, in the published rig's words, as `str`.

The schemas that clients see are made from these annotations.
"""

from __future__ import annotations

from typing import Any, Literal, Self

from prometheus_client.parser import text_string_to_metric_families
from pydantic import BaseModel, ConfigDict, Field

from rig.endpoint import Counters, counters


class _Result(BaseModel):
    model_config = ConfigDict(frozen=True)


class Answer(_Result):
    """Of ask_gemma_rust and stream_gemma_rust."""

    text: str
    model: str
    finish: str | None = Field(description="stop, or length where max_tokens was reached")
    prompt_tokens: int | None
    completion_tokens: int | None
    prompt_seconds: float | None = Field(
        description="By the engine's own timer, as is the rate; null where the server gives none"
    )
    tokens_per_second: float | None
    device: str | None = Field(description="As the server names it: tpu:0, cpu")
    round_trip_seconds: float = Field(description="From this machine")
    first_text_seconds: float | None = Field(
        default=None, description="Until the first piece of text was here; of a stream"
    )
    pieces: int | None = Field(default=None, description="In how many it came; of a stream")

    def __str__(self) -> str:
        return f"{self.text}\n---\n{self.line}"

    @property
    def line(self) -> str:
        """Everything but the text."""
        parts = [self.model, f"finish `{self.finish}`"]
        if self.prompt_tokens is not None and self.completion_tokens is not None:
            parts.append(
                f"{self.prompt_tokens} prompt + {self.completion_tokens} completion tokens"
            )
        if self.prompt_seconds is not None:
            parts.append(f"prompt read {self.prompt_seconds:.3f} s")
        if self.tokens_per_second is not None:
            parts.append(f"decode {self.tokens_per_second:.1f} tok/s{_on(self.device)}")
        if self.first_text_seconds is not None:
            parts.append(f"first text {self.first_text_seconds:.3f} s")
        parts.append(f"{self.round_trip_seconds:.2f} s round trip from here")
        return " · ".join(parts)


def _on(device: str | None) -> str:
    return f" on the {device.partition(':')[0].upper()}" if device else ""


class Stage(_Result):
    """Of the VM's boot."""

    name: str
    text: str


class Status(_Result):
    """Of endpoint_status: what /shim/status says."""

    local: str = Field(description="The address for OpenAI clients on this machine")
    upstream: str | None = Field(description="Where requests go now")
    kind: Literal["vm", "url", "router"]
    health: int | None = Field(description="HTTP status of the server's /health; null: no answer")
    queued_resource: str | None
    zone: str | None
    project: str | None
    phase: str | None
    stages: list[Stage]
    stage: str | None
    error: str | None = Field(description="Which hop fails, and what to do")

    @classmethod
    def of(cls, url: str, found: dict[str, Any]) -> Self:
        """What the shim at `url` says."""
        stages = [Stage(name=name, text=text) for name, text in found["stages"]]
        return cls(local=f"{url}/v1", **(found | {"stages": stages}))

    def __str__(self) -> str:
        sign = "🟢" if self.health == 200 else "🔴"
        lines = [f"{sign} local {self.local} → {self.upstream or 'nobody'}"]
        if self.upstream:
            what = {"vm": "TPU", "url": "server", "router": "router"}[self.kind]
            lines.append(f"- {what} /health: {self.health or 'no answer'}")
        if self.queued_resource:
            lines.append(
                f"- queued resource `{self.queued_resource}` in {self.zone}, project {self.project}"
            )
        if self.stage:
            text = {stage.name: stage.text for stage in self.stages}.get(self.stage, "")
            lines.append(f"- boot stage {self.stage}: {text}")
        if self.error:
            lines.append(f"- {self.error}")
        return "\n".join(lines)


class Engine(_Result):
    """Of engine_info: what /v1/engine says."""

    model: str
    status: str
    device: str | None
    dtype: str | None
    weight_format: str | None
    weight_bytes: int | None
    cache_bytes: int | None
    layout: dict[str, int]
    decoding: str | None
    load_seconds: float | None
    warmup_seconds: float | None
    engine_class: str
    binding: str
    versions: dict[str, str]
    checkpoint: list[str]

    @classmethod
    def of(cls, found: dict[str, Any]) -> Self:
        """The fields that are in `found`."""
        facts = {name: found.get(name) for name in cls.model_fields}
        versions = {name: str(one) for name, one in found.get("versions", {}).items() if one}
        return cls(**(facts | {"versions": versions, "layout": found.get("layout") or {}}))

    def __str__(self) -> str:
        lines = [f"{self.model} on {self.device}: {self.status}"]
        if self.weight_bytes is not None and self.cache_bytes is not None:
            lines.append(
                f"- weights {self.weight_format}, {self.weight_bytes / 1e6:.1f} MB; computes in {self.dtype}; "
                f"cache {self.cache_bytes / 1e6:.1f} MB"
            )
        lines.append("- layout: " + ", ".join(f"{name} {n}" for name, n in self.layout.items()))
        if self.load_seconds is not None and self.warmup_seconds is not None:
            lines.append(
                f"- loaded in {self.load_seconds:.2f} s, warmup {self.warmup_seconds:.2f} s"
            )
        lines.append("- " + ", ".join(f"{name} {one}" for name, one in self.versions.items()))
        return "\n".join([*lines, f"- {self.engine_class}", f"- {self.binding}"])


class Serving(Counters):
    """Of serving_metrics: what /metrics says."""

    kv_cache_usage: float | None = Field(description="0 to 1")
    first_token_seconds: float | None = Field(description="Mean, as the server sees it")
    between_tokens_seconds: float | None = Field(description="Mean, as the server sees it")

    @classmethod
    def of(cls, exposition: str) -> Self:
        """Prometheus text."""
        found: dict[str, float] = {}
        for family in text_string_to_metric_families(exposition):
            for sample in family.samples:
                name = sample.name.removeprefix("torchtpu_")
                found[name] = found.get(name, 0.0) + sample.value

        def mean(name: str) -> float | None:
            count = found.get(f"{name}_seconds_count")
            return found[f"{name}_seconds_sum"] / count if count else None

        return cls(
            **counters(exposition).model_dump(),
            kv_cache_usage=found.get("kv_cache_usage_ratio"),
            first_token_seconds=mean("time_to_first_token"),
            between_tokens_seconds=mean("inter_token_latency"),
        )

    def __str__(self) -> str:
        lines = [
            f"{self.running} running, {self.waiting} waiting",
            f"- {self.requests} requests answered, {self.cancelled} of them cancelled",
            f"- {self.prompt_tokens} prompt tokens read, {self.generation_tokens} tokens made",
        ]
        if self.kv_cache_usage is not None:
            lines.append(f"- cache in use: {self.kv_cache_usage:.1%}")
        if self.first_token_seconds is not None:
            lines.append(f"- first token after {self.first_token_seconds:.3f} s, mean")
        if self.between_tokens_seconds:
            rate = 1 / self.between_tokens_seconds
            lines.append(
                f"- between tokens {self.between_tokens_seconds * 1e3:.1f} ms, mean ({rate:.1f} tok/s)"
            )
        return "\n".join(lines)
