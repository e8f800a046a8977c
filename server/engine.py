"""The engine as the rest of the server sees it: its protocol, what goes in (`Job`) and what comes out (`Event`).

The only module that imports torch or torchtpu_rs, and only inside functions: `--help` must not wait for torch, and
the engine must be built on the thread that will own it. Knows token ids, never text or HTTP.
"""

from __future__ import annotations

import importlib.metadata
import os
import platform
import threading
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    from server.settings import Dtype, Mode

Finish = Literal["stop", "length", "cancelled"]


class Decoded(Protocol):
    """What one `Engine.decode` call reports when it is over."""

    @property
    def ids(self) -> list[int]:
        """The new token ids, without the stop id."""

    @property
    def finish(self) -> str:
        """`stop`, `length` or `cancelled`."""

    @property
    def stop_id(self) -> int | None:
        """The id that ended the turn, when `finish` is `stop`."""

    @property
    def prompt_tokens(self) -> int:
        """Length of the prompt."""

    @property
    def prefill_seconds(self) -> float:
        """The engine's own seconds for reading the prompt."""

    @property
    def decode_seconds(self) -> float:
        """The engine's own seconds for making the new tokens."""


class Engine(Protocol):
    """The part of `torchtpu_rs.Engine` the server uses; only the thread that built it may touch it."""

    def decode(
        self,
        ids: list[int],
        max_new: int,
        stop: list[int] | None = None,
        read_every: int = 1,
        on_tokens: Callable[[list[int]], object] | None = None,
    ) -> Decoded:
        """Continue `ids` greedily; a false return of `on_tokens` ends it.

        Raises:
            ValueError: for input the caller got wrong; the engine stays usable.
        """

    def info(self) -> Mapping[str, Any]:
        """Layout, dtype, device, weight format, bytes and load seconds."""


@dataclass(frozen=True, slots=True)
class Started:
    """The worker took the job; `at` is `time.monotonic()` like every `at` here."""

    at: float


@dataclass(frozen=True, slots=True)
class Tokens:
    """New token ids, in order, never the stop id."""

    token_ids: tuple[int, ...]
    at: float


@dataclass(frozen=True, slots=True)
class Finished:
    """The job is over and the engine is free."""

    finish: Finish
    stop_id: int | None
    prefill_seconds: float
    decode_seconds: float
    at: float


@dataclass(frozen=True, slots=True)
class Failed:
    """The engine raised; `caller_fault` when it was a ValueError."""

    message: str
    caller_fault: bool


Event = Started | Tokens | Finished | Failed


@dataclass(frozen=True, slots=True, eq=False)
class Job:
    """One prompt for the worker. `emit` is called on the engine thread; `cancelled` may be set from any thread."""

    token_ids: list[int]
    max_new: int
    stop_ids: list[int] | None
    """None: the checkpoint's own end-of-turn ids; an empty list: none at all."""
    emit: Callable[[Event], None]
    cancelled: threading.Event = field(default_factory=threading.Event)


@dataclass(frozen=True, slots=True)
class Tpu:
    """How the device `tpu` is started and how steps run on it."""

    mode: Mode = "compiled"
    simulate: bool = False
    slots: int = 8
    int8: bool = False
    cache: Path | None = None
    """Keeps compiled programs between runs."""


ARITHMETIC: dict[bool | None, Literal["auto", "exact", "fast"]] = {
    None: "auto",
    True: "exact",
    False: "fast",
}


def load_engine(
    places: Sequence[Path],
    *,
    context: int,
    device: str,
    dtype: Dtype | None,
    prefill_chunk: int | None,
    exact: bool | None,
    threads: int | None,
    tpu: Tpu,
    on_load: Callable[[int, int], object],
    on_compile: Callable[[int, int, str], object],
) -> Engine:
    """Build the Rust engine on the calling thread, which owns it from then on.

    `exact` (see `Settings`) is for a CPU.
    `on_compile` hears (programs there, programs in all, which comes next) from this thread while the first are compiled,
    and from another one later.

    Raises:
        ValueError: the checkpoint is bad or the device is unknown.
        ImportError: torchtpu_rs was built for another torch, or TorchTPU is missing.
        RuntimeError: the device cannot be started, or a program cannot be compiled.
    """
    # With torch_tpu installed, `import torch` alone would look for a TPU, for minutes where there is none.
    os.environ.setdefault("TORCH_DEVICE_BACKEND_AUTOLOAD", "0")
    import torch

    if threads is not None:
        # OpenMP keeps the thread count per calling thread, so it is set on the thread that computes.
        torch.set_num_threads(threads)
    on_tpu = device.partition(":")[0] == "tpu"
    if on_tpu:
        from tpu import device as tpu_device

        tpu_device.start(simulate=tpu.simulate, mode=tpu.mode)
    import torchtpu_rs

    programs = None
    if on_tpu and tpu.mode == "compiled":
        from torchtpu_rs.capture import Programs
        from torchtpu_rs.recording import Plan

        plan = Plan(slots=tpu.slots, int8=tpu.int8)
        programs = Programs([str(place) for place in places], plan, tpu.cache, on_compile)
    like = torch.zeros(1, device=device)
    engine: Engine = torchtpu_rs.Engine(
        list(places),
        like,
        context,
        dtype=dtype,
        prefill_chunk=prefill_chunk,
        arithmetic=ARITHMETIC[exact],
        programs=programs,
        on_load=on_load,
    )
    return engine


def gguf_metadata(file: Path) -> Mapping[str, object]:
    """The keys and values of a GGUF file, under llama.cpp's names; imports torch.

    Raises:
        ValueError: it is no GGUF file, or a broken one; the message names the key.
        OSError: it cannot be read.
        ImportError: torchtpu_rs was built for another torch.
    """
    os.environ.setdefault("TORCH_DEVICE_BACKEND_AUTOLOAD", "0")
    import torchtpu_rs

    return torchtpu_rs.gguf_metadata(file)


def smoke(device: str) -> str:
    """A Rust call on a tensor on `device`, in one line with its result: 512.

    Raises:
        RuntimeError: the device cannot be started.
    """
    os.environ.setdefault("TORCH_DEVICE_BACKEND_AUTOLOAD", "0")
    import torch

    if device.partition(":")[0] == "tpu":
        from tpu import device as tpu_device

        tpu_device.start(simulate=False, mode="compiled")
    import torchtpu_rs

    found = torchtpu_rs.matmul_sum(torch.zeros(1, device=device))
    version = torchtpu_rs.BUILD["crate"]
    return f"torchtpu_rs {version} matmul_sum {found.item()} on {found.device}"


def engine_build() -> dict[str, str]:
    """What built the Rust module (`torchtpu_rs.BUILD`); imports torch."""
    import torchtpu_rs

    return dict(torchtpu_rs.BUILD)


def package_version() -> str:
    """The version of this package; a tree that is not installed has none."""
    return _version_of("torchtpu-rs") or "0+unknown"


def installed_versions() -> dict[str, str | None]:
    """Versions of this process and of the packages that matter, without importing them; None where one is missing."""
    packages = ("torch", "torch_tpu", "libtpu", "transformers", "tokenizers")
    return {
        "python": platform.python_version(),
        "torchtpu_rs": package_version(),
        **{package: _version_of(package) for package in packages},
    }


def _version_of(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
