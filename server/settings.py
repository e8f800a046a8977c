"""Every setting of one server process, read once by `cli` and passed on.

Nothing else reads flags or the environment. Each field is a flag of `torchtpu-rs serve` and `TORCHTPU_<FIELD>`.
"""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, SecretStr

Dtype = Literal["bfloat16", "float16", "float32"]


class Settings(BaseModel):
    """One frozen set of settings; unknown names are refused."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    model: tuple[str, ...] = Field(min_length=1)
    """Checkpoint folders or Hub ids; a tensor is taken from the first that has it."""
    served_model_name: tuple[str, ...] = ()
    """Names clients may ask for; the first is the one answers carry. Empty: derived from `model`."""
    host: str = "127.0.0.1"
    port: int = Field(default=8000, ge=0, le=65535)
    context: int = Field(default=8192, ge=2)
    """Positions the cache holds: prompt and answer together."""
    device: str = "cpu"
    dtype: Dtype | None = None
    threads: int | None = Field(default=None, ge=1)
    read_every: int = Field(default=1, ge=1)
    """Tokens the engine makes between two looks at the host; also how late a cancel can be."""
    prefill_chunk: int | None = Field(default=None, ge=2)
    """Static shapes: prompts run in padded chunks of this many tokens. For devices that compile."""
    max_queue: int = Field(default=64, ge=0)
    """Requests that may wait while one runs; the next gets 503."""
    api_key: SecretStr | None = None
    cors_origin: tuple[str, ...] = ()
    """Origins allowed besides localhost; `*` allows all."""
    drain_seconds: float = Field(default=20.0, ge=0)
    """How long running requests may take after SIGTERM."""
    ping_seconds: float = Field(default=15.0, gt=0)
    """Silence after which a stream gets an SSE comment."""
    max_body_bytes: int = Field(default=4 * 1024 * 1024, ge=1024)
    log_level: Literal["debug", "info", "warning", "error"] = "info"
