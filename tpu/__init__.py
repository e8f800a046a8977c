"""TorchTPU on this machine: the device itself, or the one simulated on the CPU, and what a step costs on a v5e."""

from pathlib import Path

E2B = Path(__file__).with_name("e2b")
"""A folder with the text part of E2B's published config.json, and no weights."""
