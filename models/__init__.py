"""The model that ships in this tree: a small Gemma 4 that answers as soon as the server starts.

Owns where the checkpoint lies. How it was made is in `models/training` and `models/README.md`.
"""

from pathlib import Path

EMBEDDED: Path = Path(__file__).parent / "gemma4-embedded"
"""Folder of the embedded checkpoint, in the layout of a Hugging Face download."""

EMBEDDED_W4A16: Path = Path(__file__).parent / "gemma4-embedded-w4a16"
"""The same with weights and tables packed in four bits (compressed-tensors), made by `torchtpu-rs quantize`."""
