"""Writes packed checkpoints: compressed-tensors `pack-quantized`, as the published W4A16 ones of Gemma 4 are.

`convert` is the whole of it: `plan` decides by names and shapes, `files` reads and writes safetensors in slices, `grid`
finds integers and factors. Knows no server, no engine and no compressed-tensors, which only judges it in the tests.
"""

from quantize.conversion import Summary, convert
from quantize.files import QuantizeError
from quantize.plan import FORMATS

__all__ = ["FORMATS", "QuantizeError", "Summary", "convert"]
