"""Gemma 4 in Rust on PyTorch devices: the Python face of the compiled module.

Imports torch, which brings its libraries into the process; compares it with the PyTorch the module was
built against; only then loads the module. Knows nothing of models.
"""

import mmap
import os
import re
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path

# With torch_tpu installed, `import torch` looks for a TPU by itself, for minutes where there is none. Who wants the device
# starts it (tpu/device.py).
os.environ.setdefault("TORCH_DEVICE_BACKEND_AUTOLOAD", "0")

import torch

# The module carries this mark so that it can be asked which PyTorch it wants without being loaded:
# built for another C++ ABI, loading it may fail with an unreadable message or crash.
_MARK = re.compile(rb"torchtpu_rs built against torch=([^\s;]+);")


def _check_torch() -> None:
    """Raises ImportError when the module is not built, or built against another PyTorch."""
    folder = Path(__file__).parent
    rebuild = "rebuild it against this one: pip install --no-build-isolation --force-reinstall --no-deps torchtpu-rs (in a checkout: make build)"
    files = [folder / f"_native{suffix}" for suffix in EXTENSION_SUFFIXES]
    file = next((file for file in files if file.is_file()), None)
    if file is None:
        raise ImportError(
            f"torchtpu_rs is not built for this Python: no {files[0].name}; {rebuild}"
        )
    with file.open("rb") as opened, mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ) as data:
        mark = _MARK.search(data)
        built = mark.group(1).decode() if mark else "an unknown version"
    if built != torch.__version__:
        raise ImportError(
            f"torchtpu_rs was built against torch {built}, but torch {torch.__version__} is installed; {rebuild}"
        )


_check_torch()

from torchtpu_rs._native import (  # noqa: E402  (only after torch and the check)
    BUILD,
    CheckpointError,
    ContextFullError,
    Decoded,
    DeviceError,
    Engine,
    Step,
    gguf_metadata,
    matmul_sum,
    memory_needed,
)

__all__ = [
    "BUILD",
    "CheckpointError",
    "ContextFullError",
    "Decoded",
    "DeviceError",
    "Engine",
    "Step",
    "gguf_metadata",
    "matmul_sum",
    "memory_needed",
]
