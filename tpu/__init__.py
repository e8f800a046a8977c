"""TorchTPU on this machine: the device itself, or the one simulated on the CPU, and what a step costs on a v5e."""

import os
from pathlib import Path

E2B = Path(__file__).with_name("e2b")
"""A folder with the text part of E2B's published config.json, and no weights."""


def user_cache() -> Path:
    """The user's folder for what can be made again: compiled programs, the forwarding plugin, checkpoints of benchmarks."""
    return Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "torchtpu_rs"
