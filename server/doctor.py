"""A report on whether serving would work here: torch, TorchTPU, the module, device, threads, memory, checkpoint.

Each check stands alone and says what to do; none loads weights. Knows no HTTP.
"""

from __future__ import annotations

import importlib.util
import json
import os
import platform
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from server.admission import NO_TEMPLATE
from server.checkpoint import CheckpointError, is_local, resolve, weight_bytes
from server.engine import engine_build, gguf_metadata, installed_versions
from server.loading import load_text_side

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

Status = Literal["ok", "warning", "failed"]
Check = dict[str, Any]

# Weights are mapped; the cache and what ATen computes stand beside them.
HEADROOM = 1.2
DEVICE_SECONDS = 120


def examine(models: Sequence[str], device: str, *, simulate_tpu: bool = False) -> dict[str, Any]:
    """All checks; `ok` is false when one of them would keep the server from starting."""
    places = _places(models)
    checks: dict[str, Callable[[], Check]] = {
        "python": _python,
        "torch": _torch,
        "module": _module,
        "torch_tpu": lambda: _torch_tpu(device),
        "device": lambda: _device(device, simulate_tpu),
        "threads": _threads,
        "checkpoint": lambda: _checkpoint(models, places),
        "memory": lambda: _memory(places),
    }
    report = {name: check() for name, check in checks.items()}
    return {"ok": all(check["status"] != "failed" for check in report.values()), "checks": report}


def lines(report: dict[str, Any]) -> Iterator[str]:
    """The report for people: a line a check."""
    for name, check in report["checks"].items():
        yield f"{check['status']:<8} {name:<11} {check['message']}"


def _check(status: Status, message: str, **facts: Any) -> Check:
    return {"status": status, "message": message, **facts}


def _python() -> Check:
    version = platform.python_version()
    return _check("ok", f"Python {version} on {platform.machine()}", version=version)


def _torch() -> Check:
    version = installed_versions()["torch"]
    if version is None:
        return _check("failed", "torch is not installed; run `pip install torch`")
    return _check("ok", f"torch {version}", version=version)


def _module() -> Check:
    """The Rust module refuses by itself to load under another torch than it was built for."""
    try:
        build = engine_build()
    except ImportError as error:
        return _check("failed", f"torchtpu_rs does not load: {error}")
    return _check(
        "ok", f"torchtpu_rs {build['crate']}, built for torch {build['torch']}", build=build
    )


def _torch_tpu(device: str) -> Check:
    versions = installed_versions()
    facts = {"version": versions["torch_tpu"], "libtpu": versions["libtpu"]}
    if versions["torch_tpu"]:
        return _check(
            "ok", f"torch_tpu {facts['version']}, libtpu {facts['libtpu'] or 'missing'}", **facts
        )
    needed = device == "tpu"
    hint = "run `pip install torch_tpu`" if needed else "not needed for this device"
    return _check("failed" if needed else "ok", f"torch_tpu is not installed; {hint}", **facts)


def _device(device: str, simulate_tpu: bool = False) -> Check:
    """Puts one number on the device, which is what the engine does first."""
    if device.partition(":")[0] == "tpu":
        return _tpu_device(device, simulate_tpu)
    if importlib.util.find_spec("torch") is None:
        return _check("failed", "not tried without torch", device=device)
    import torch

    try:
        where = str(torch.zeros(1, device=device).device)
    except (ImportError, RuntimeError, NotImplementedError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        return _check("failed", f"{device} does not work: {reason}", device=device)
    return _check("ok", f"a tensor was made on {where}", device=where)


def _tpu_device(device: str, simulate: bool) -> Check:
    """The same in a process of its own: starting the device changes PyTorch for the whole process."""
    code = (
        f"from tpu import device; device.start(simulate={simulate}); import torch; "
        f"print(torch.zeros(1, device={device!r}).device)"
    )
    command = [sys.executable, "-c", code]
    try:
        run = subprocess.run(
            command, capture_output=True, text=True, timeout=DEVICE_SECONDS, check=False
        )
    except subprocess.TimeoutExpired:
        return _check("failed", f"{device} did not start in {DEVICE_SECONDS} s", device=device)
    if run.returncode != 0:
        reason = run.stderr.strip().rpartition("\n")[2] or f"exit status {run.returncode}"
        return _check("failed", f"{device} does not work: {reason}", device=device)
    where = run.stdout.strip().rpartition("\n")[2]
    return _check("ok", f"a tensor was made on {where}", device=where, simulated=simulate)


def _threads() -> Check:
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    if importlib.util.find_spec("torch") is None:
        return _check("warning", f"{usable} usable CPUs", usable=usable)
    import torch

    threads = torch.get_num_threads()
    facts = {"usable": usable, "torch": threads}
    if usable and threads > usable:
        return _check(
            "warning",
            f"torch would use {threads} threads on {usable} CPUs; pass --threads {usable}",
            **facts,
        )
    return _check("ok", f"torch uses {threads} threads, {usable} CPUs are usable", **facts)


def _places(models: Sequence[str]) -> list[Path] | CheckpointError | None:
    """Where the models lie, what is wrong with them, or None for one that only the Hub may have."""
    if not all(map(is_local, models)):
        return None
    try:
        return resolve(models)
    except CheckpointError as error:
        return error


def _checkpoint(models: Sequence[str], places: list[Path] | CheckpointError | None) -> Check:
    if places is None:
        missing = next(name for name in models if not is_local(name))
        return _check(
            "warning", f"{missing} is no local folder or file; serving would ask the Hub for it"
        )
    if isinstance(places, CheckpointError):
        return _check("failed", str(places))
    try:
        text = load_text_side(places[0])
        architecture = _architecture(places[0])
    except (ValueError, OSError, ImportError) as error:
        return _check("failed", str(error))
    size = weight_bytes(places)
    message = f"{places[0]}: {size / 1e6:.1f} MB of weights, {text.tokenizer.vocab_size} tokens"
    return _check(
        "ok",
        message if text.template else f"{message}; {NO_TEMPLATE}",
        folders=[str(place) for place in places],
        weight_bytes=size,
        vocab_size=text.tokenizer.vocab_size,
        architecture=architecture,
        chat_template=text.template is not None,
    )


def _memory(places: list[Path] | CheckpointError | None) -> Check:
    available = _available_bytes()
    if available is None:
        return _check("warning", "this system does not tell how much memory is free")
    needed = int(weight_bytes(places) * HEADROOM) if isinstance(places, list) else 0
    message = f"{available / 1e9:.1f} GB available, the weights need about {needed / 1e9:.1f} GB"
    # A mapped file larger than memory still works, page by page, and slowly.
    status: Status = "ok" if available > needed else "warning"
    return _check(status, message, available_bytes=available, needed_bytes=needed)


def _architecture(place: Path) -> str | None:
    """What the checkpoint calls itself: Hugging Face's class, or llama.cpp's name in a GGUF file."""
    if not place.is_dir():
        return str(gguf_metadata(place).get("general.architecture"))
    try:
        names = json.loads((place / "config.json").read_text("utf-8"))["architectures"]
        return str(names[0])
    except (OSError, ValueError, LookupError, TypeError):
        return None


def _available_bytes() -> int | None:
    """Memory that can be had without swapping: the system's, or the control group's where that is less."""
    try:
        pairs = (line.split(":") for line in Path("/proc/meminfo").read_text("ascii").splitlines())
        system = {name: int(value.split()[0]) * 1024 for name, value in pairs}["MemAvailable"]
    except (OSError, ValueError, LookupError):
        return None
    try:
        group = Path("/sys/fs/cgroup")
        limit = int((group / "memory.max").read_text("ascii"))
        return min(system, limit - int((group / "memory.current").read_text("ascii")))
    except (OSError, ValueError):  # no control group, or one without a limit ("max")
        return system
