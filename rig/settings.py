"""tpu.env, read and checked: one model for every key, with errors that name the key.

The file is also read by bash on the VM, so values are plain words; what is a list here is words apart by spaces there.
"""

from __future__ import annotations

import re
from datetime import timedelta
from ipaddress import IPv4Network, ip_network
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Field, ValidationError, field_validator, model_validator
from pydantic_settings import BaseSettings, NoDecode, PydanticBaseSettingsSource, SettingsConfigDict

ROOT = Path(__file__).parents[1]
FILE = ROOT / "tpu.env"

LONGEST_RUN = timedelta(days=7)
"""Flex-start's limit (cloud.google.com/tpu/docs/request-using-flex-start)."""

# RFC 1035 labels, as the API wants names; the node's name adds five characters.
NAME = r"^[a-z]([a-z0-9-]{0,56}[a-z0-9])?$"

_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400}


class SettingsError(ValueError):
    """A setting is wrong; the text names key, what was expected and what was found."""


def _duration(value: object) -> object:
    """`90s`, `30m`, `4h`, `1d`."""
    if not isinstance(value, str):
        return value
    found = re.fullmatch(r"(\d+)([smhd])", value.strip())
    if not found:
        raise ValueError(f"expected a number and s, m, h or d (4h), found {value!r}")
    return timedelta(seconds=int(found[1]) * _UNITS[found[2]])


def _words(value: object) -> object:
    return tuple(value.split()) if isinstance(value, str) else value


Duration = Annotated[timedelta, BeforeValidator(_duration)]
Words = Annotated[tuple[str, ...], NoDecode, BeforeValidator(_words)]
Provisioning = Literal["flex-start", "spot", "on-demand", "reserved"]
Step = Literal["compiled", "fused", "eager"]


class Settings(BaseSettings):
    """Every key of tpu.env, in its order; unknown keys are refused."""

    model_config = SettingsConfigDict(frozen=True, extra="forbid", env_file_encoding="utf-8")

    project_id: str | None = None
    zone: str = Field(default="us-west4-a", pattern=r"^[a-z]+-[a-z]+\d+-[a-z]$")
    queued_resource: str = Field(default="gemma4-rust-qr", pattern=NAME)
    accelerator_type: str = Field(default="v5litepod-1", pattern=r"^[a-z0-9]+-\d+$")
    runtime_version: str = "v2-alpha-tpuv5-lite"

    provisioning_model: Provisioning = "flex-start"
    max_run_duration: Duration = timedelta(hours=4)
    valid_until: Duration = timedelta(hours=2)
    max_cost_usd: float = Field(default=5, gt=0)
    idle_minutes: int = Field(default=0, ge=0)

    network: str = "default"
    subnetwork: str | None = None
    network_tags: Words = ("tpu-rust",)
    access: Literal["direct", "iap"] = "direct"
    source_range: IPv4Network | None = None
    service_account: str | None = None
    api_key_secret: str | None = None
    hf_token_secret: str | None = None

    checkpoints: Words = (
        "xbill9/gemma-4-E2B-it-qat-q4_0-w4a16-ct-text-emb4",
        "xbill9/gemma-4-E2B-it-qat-q4_0-w4a16-ct-text",
    )
    revisions: Words = ("main", "main")
    serve_context: int = Field(default=8192, ge=2)
    serve_step: Step = "compiled"
    serve_defer_and_fuse: Literal["0", "1"] = "0"
    serve_weight_format: Literal["int8"] | None = None
    serve_slots: int = Field(default=8, ge=1, le=128)
    serve_port: int = Field(default=8000, ge=1, le=65535)

    python_bin: str = Field(default="python3.14", pattern=r"^python3\.1[1-4]$")
    torch_pip_spec: str = Field(
        default="torch==2.14.1 torch_tpu==0.2.0 tokenizers==0.23.3 'jinja2>=3.1.6' huggingface_hub==2.4.0",
        min_length=1,
    )
    rust_toolchain: str = Field(default="stable", pattern=r"^[a-z0-9.-]+$")

    @field_validator(
        "project_id", "subnetwork", "source_range", "service_account", "api_key_secret",
        "hf_token_secret", "serve_weight_format", mode="before",
    )  # fmt: skip
    @classmethod
    def _empty_is_none(cls, value: object) -> object:
        return None if value == "" else value

    @field_validator("source_range", mode="before")
    @classmethod
    def _network(cls, value: object) -> object:
        return ip_network(value) if isinstance(value, str) and value else value

    @model_validator(mode="after")
    def _keys_fit_each_other(self) -> Self:
        if not self.checkpoints:
            raise ValueError("CHECKPOINTS: expected at least one Hub id, found none")
        if len(self.revisions) != len(self.checkpoints):
            raise ValueError(
                f"REVISIONS: expected one for each of the {len(self.checkpoints)} CHECKPOINTS, "
                f"found {len(self.revisions)}"
            )
        if not timedelta(minutes=10) <= self.max_run_duration <= LONGEST_RUN:
            raise ValueError(
                "MAX_RUN_DURATION: expected 10m to 7d: a boot alone takes five minutes"
            )
        if self.serve_defer_and_fuse == "1" and self.serve_step == "eager":
            raise ValueError("SERVE_DEFER_AND_FUSE: expected 0 with SERVE_STEP=eager, found 1")
        if self.serve_weight_format and self.mode != "compiled":
            raise ValueError(
                f"SERVE_WEIGHT_FORMAT: int8 is for SERVE_STEP=compiled, found {self.mode}"
            )
        return self

    @property
    def mode(self) -> Step:
        """How steps run: the published rig's switch wins, for whoever brings its tpu.env."""
        return "fused" if self.serve_defer_and_fuse == "1" else self.serve_step

    @property
    def node_id(self) -> str:
        """Name of the queued resource's node."""
        return f"{self.queued_resource}-node"

    @property
    def parent(self) -> str:
        """The zone as the API names it.

        Raises:
            SettingsError: no project is set.
        """
        if not self.project_id:
            raise SettingsError(
                "PROJECT_ID: expected a Google Cloud project, found none (set it in tpu.env or give --project)"
            )
        return f"projects/{self.project_id}/locations/{self.zone}"

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Arguments first, then the environment, then the file."""
        return init_settings, env_settings, dotenv_settings


def read(file: Path = FILE, **given: Any) -> Settings:
    """The settings of `file`; the environment and then `given` win over it.

    Raises:
        SettingsError: the file is missing, or a key is unknown or wrong.
    """
    if not file.is_file():
        raise SettingsError(f"expected the settings in {file}, found no such file")
    known = {key: value for key, value in given.items() if value is not None}
    try:
        return Settings(_env_file=file, **known)  # type: ignore[call-arg]
    except ValidationError as error:
        raise SettingsError(_told(error, file)) from error


def _told(error: ValidationError, file: Path) -> str:
    lines = []
    for problem in error.errors(include_url=False):
        message = problem["msg"].removeprefix("Value error, ")
        key = str(problem["loc"][0]).upper() if problem["loc"] else ""
        if problem["type"] == "extra_forbidden":
            message = f"{file.name} has no such setting"
        found = f", found {problem['input']!r}" if key and "found" not in message else ""
        lines.append(f"{key}: {message}{found}" if key else message)
    return "\n".join(lines)
