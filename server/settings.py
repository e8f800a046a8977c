"""Every setting of one server process, read once by `cli` and passed on.

Nothing else reads flags or the environment. Each field is a flag of `torchtpu-rs serve` and `TORCHTPU_<FIELD>`.
"""

from __future__ import annotations

from typing import Literal, Self

from pydantic import BaseModel, ConfigDict, Field, SecretStr, model_validator

Dtype = Literal["bfloat16", "float16", "float32"]
Mode = Literal["eager", "fused", "compiled"]


class Settings(BaseModel):
    """One frozen set of settings; unknown names are refused."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    model: tuple[str, ...] = Field(min_length=1)
    """Checkpoint folders, GGUF files, Hub ids or names of packaged models; a tensor is taken from the first that has it."""
    served_model_name: tuple[str, ...] = ()
    """Names clients may ask for; the first is the one answers carry. Empty: derived from `model`."""
    host: str = "127.0.0.1"
    port: int = Field(default=8000, ge=0, le=65535)
    context: int = Field(default=8192, ge=2)
    """Positions the cache holds: prompt and answer together."""
    device: str = "cpu"
    dtype: Dtype | None = None
    mode: Mode | None = None
    """How steps run on `tpu`: operation by operation, with deferred and fused operations, or compiled whole (the default)."""
    simulate_tpu: bool = False
    """`tpu` is TorchTPU on this machine's CPU."""
    weight_format: Literal["int8"] | None = None
    """Projections in another format than the checkpoint's; for compiled steps."""
    exact: bool | None = None
    """On `cpu`: transformers' bits, or kernels of our own. None: those for quantized weights, exactness for others."""
    slots: int = Field(default=8, ge=1, le=128)
    """Rows of a compiled decode step."""
    compile_cache: str | None = None
    """Folder that keeps compiled programs between runs; the empty string keeps none."""
    threads: int | None = Field(default=None, ge=1)
    read_every: int | None = Field(default=None, ge=1)
    """Tokens the engine makes between two looks at the host; also how late a cancel can be. Default: 1, and 32 with
    compiled steps."""
    prefill_chunk: int | None = Field(default=None, ge=2)
    """Static shapes: prompts run in padded chunks of this many tokens. For devices that compile."""
    max_queue: int = Field(default=64, ge=0)
    """Requests that may wait while one runs; the next gets 503."""
    api_key: SecretStr | None = None
    cors_origin: tuple[str, ...] = ()
    """Origins allowed besides localhost; `*` allows all."""
    page: bool = True
    """Browsers that open `/` get the chat page."""
    drain_seconds: float = Field(default=20.0, ge=0)
    """How long running requests may take after SIGTERM."""
    ping_seconds: float = Field(default=15.0, gt=0)
    """Silence after which a stream gets an SSE comment."""
    max_body_bytes: int = Field(default=4 * 1024 * 1024, ge=1024)
    log_level: Literal["debug", "info", "warning", "error"] = "info"

    @model_validator(mode="after")
    def _tpu_options_go_with_tpu(self) -> Self:
        if self.device.partition(":")[0] != "tpu":
            for name in ("mode", "simulate_tpu", "weight_format"):
                if getattr(self, name):
                    raise ValueError(f"{name} is for --device tpu, found --device {self.device}")
        elif self.exact is not None:
            flag = "--exact" if self.exact else "--fast"
            raise ValueError(f"{flag} is for --device cpu, found --device {self.device}")
        elif self.weight_format == "int8" and self.mode in ("eager", "fused"):
            raise ValueError(f"weight_format int8 is for compiled steps, found --mode {self.mode}")
        return self
