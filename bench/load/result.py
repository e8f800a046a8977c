"""The file of a run: what was asked of which endpoint from where, every request as it went, and the figures. JSON, by name.

Holds neither the key nor more of the address than scheme, host, port and path.
"""

from __future__ import annotations

import importlib.metadata
import os
import platform
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from bench.load.figures import Level, Load
from bench.load.published import (
    MAX_TOKENS,
    PROMPT,
    PROMPTS,
    REQUESTS,
    TIMEOUT_SECONDS,
    Benchmark,
    usd_per_million_tokens,
)
from bench.load.wire import Ask, BenchmarkError

if TYPE_CHECKING:
    from pathlib import Path
    from typing import Self

CONCURRENCY = (1, 2, 4, 8)
PACKAGES = ("torchtpu-rs", "httpx", "httpcore", "h11")


class _Frozen(BaseModel):
    model_config = ConfigDict(frozen=True)


class Settings(_Frozen):
    """What is measured, and how: two results with the same settings can be compared."""

    parts: tuple[Literal["published", "load"], ...] = ("published", "load")
    prompt: str = PROMPT
    """Of the published protocol's requests."""
    prompts: tuple[str, ...] = Field(default=PROMPTS, min_length=1)
    """Of the streams, in turn. They repeat, so a server that keeps prefixes has them."""
    requests: int = Field(default=REQUESTS, ge=1)
    max_tokens: int = Field(default=MAX_TOKENS, ge=1)
    concurrency: tuple[int, ...] = CONCURRENCY
    rates: tuple[float, ...] = ()
    """Requests a second of an open load, in place of the closed one."""
    requests_per_level: int | None = Field(default=None, ge=1)
    duration_seconds: float | None = Field(default=None, gt=0)
    warmup: int = Field(default=1, ge=0)
    """Requests of each caller before a level, which are not counted."""
    timeout_seconds: float = Field(default=TIMEOUT_SECONDS, gt=0)
    seed: int = 0
    model: str | None = None
    fields: dict[str, Any] = Field(default_factory=dict)
    """Added to the body of each request."""

    @model_validator(mode="after")
    def _can_be_run(self) -> Self:
        if self.requests_per_level is not None and self.duration_seconds is not None:
            raise ValueError("give requests per level or a duration, not both")
        if any(size <= 0 for size in (*self.concurrency, *self.rates)):
            raise ValueError("expected concurrency and rates above 0")
        if "load" in self.parts and not (self.concurrency or self.rates):
            raise ValueError("expected a concurrency or a rate, found none")
        return self

    def ask(self) -> Ask:
        """What every request has in common."""
        return Ask(self.max_tokens, self.model, self.fields)

    def loads(self) -> list[Load]:
        """The levels, in order."""
        if self.rates:
            return [Load(kind="open", size=rate) for rate in self.rates]
        return [Load(kind="closed", size=callers) for callers in self.concurrency]


class Endpoint(_Frozen):
    """What was measured, as far as it tells."""

    url: str
    model: str
    server: str
    """`torchtpu-rs`, `llama.cpp`, `vLLM`, or whom it says its models are owned by."""
    version: str | None = None
    info: dict[str, Any] = Field(default_factory=dict)
    """What it says of its engine: /v1/engine of torchtpu-rs, parts of /props of llama.cpp and of /v1/models."""

    def __str__(self) -> str:
        version = f" {self.version}" if self.version else ""
        return f"{self.model} at {self.url}, {self.server}{version}"


class Client(_Frozen):
    """From where it was measured."""

    python: str
    machine: str
    cores: int
    versions: dict[str, str]
    load_average: float
    """Of the last minute, when the run began: other work on this machine is in the figures."""

    @classmethod
    def here(cls) -> Client:
        """This machine."""
        versions = {}
        for name in PACKAGES:
            try:
                versions[name] = importlib.metadata.version(name)
            except importlib.metadata.PackageNotFoundError:
                versions[name] = "not installed"
        return cls(
            python=platform.python_version(),
            machine=f"{platform.system()} {platform.machine()}",
            cores=os.cpu_count() or 1,
            versions=versions,
            load_average=round(os.getloadavg()[0], 2),
        )


class Result(_Frozen):
    """A run."""

    form: Literal["torchtpu-rs bench 1"] = "torchtpu-rs bench 1"
    date: datetime
    complete: bool
    """Whether it ran to its end; what was measured until then is there."""
    endpoint: Endpoint
    client: Client
    settings: Settings
    usd_per_hour: float | None = None
    published: Benchmark | None = None
    levels: tuple[Level, ...] = ()

    def usd_per_million(self, tokens_per_second: float) -> float | None:
        """What a million output tokens cost at that rate; None without a price, or without tokens."""
        if self.usd_per_hour is None or tokens_per_second <= 0:
            return None
        return usd_per_million_tokens(self.usd_per_hour, tokens_per_second)


def now() -> datetime:
    """The date of a result."""
    return datetime.now(UTC).replace(microsecond=0)


def read(file: Path) -> Result:
    """A result from its file.

    Raises:
        BenchmarkError: the file cannot be read, or is none of ours.
    """
    try:
        return Result.model_validate_json(file.read_bytes())
    except OSError as error:
        raise BenchmarkError(
            f"expected a result of `torchtpu-rs bench --json`, found {error}"
        ) from error
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(map(str, first["loc"]))
        raise BenchmarkError(
            f"expected a result of `torchtpu-rs bench --json` in {file}, found another file ({where}: {first['msg']})"
        ) from error
