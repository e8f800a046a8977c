"""Safetensors read and written in slices, with plain reads and writes: what is in memory is what a caller asked for.

A header is checked before anything is allocated for its tensors. Knows bytes, shapes and element types, not what they are for.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from types import TracebackType
    from typing import BinaryIO, Self

# In the order in which the safetensors library lays tensors out: wide elements first, so that all stand aligned.
ELEMENT_BYTES = {
    "U64": 8, "I64": 8, "F64": 8, "F32": 4, "U32": 4, "I32": 4, "BF16": 2, "F16": 2, "U16": 2, "I16": 2,
    "F8_E8M0": 1, "F8_E4M3": 1, "F8_E5M2": 1, "I8": 1, "U8": 1, "BOOL": 1,
}  # fmt: skip
DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
"""What weights to be packed may be."""
INDEX = "model.safetensors.index.json"

# As the safetensors library has it.
_MAX_HEADER = 100_000_000
_COPIED_AT_ONCE = 4 << 20


class QuantizeError(ValueError):
    """A checkpoint cannot be packed; the message names what is wrong and says what to do."""


@dataclass(frozen=True)
class Tensor:
    """A tensor in a file."""

    name: str
    file: Path
    dtype: str
    shape: tuple[int, ...]
    begin: int
    """Where its first byte stands in the file."""

    @property
    def bytes(self) -> int:
        """Its size."""
        return math.prod(self.shape) * ELEMENT_BYTES[self.dtype]

    def rows(self, at_once: int, blocks: int = 1) -> Iterator[tuple[int, int, torch.Tensor]]:
        """Slices `[rows, columns]` of about `at_once` elements, whole rows of one of `blocks` equal parts of the tensor's rows, each
        with the part's number and its first row's number there."""
        *heights, width = self.shape
        height = math.prod(heights) // blocks
        step = max(1, at_once // max(1, width))
        row_bytes = width * ELEMENT_BYTES[self.dtype]
        with self.file.open("rb", buffering=0) as file:
            for block in range(blocks):
                for first in range(0, height, step):
                    count = min(step, height - first)
                    begin = (block * height + first) * row_bytes
                    held = self._read(file, begin, count * row_bytes)
                    rows = torch.frombuffer(held, dtype=DTYPES[self.dtype]).view(count, width)
                    yield block, first, rows

    def pieces(self) -> Iterator[tuple[int, bytearray]]:
        """All bytes in pieces, each with its offset."""
        with self.file.open("rb", buffering=0) as file:
            for offset in range(0, self.bytes, _COPIED_AT_ONCE):
                yield offset, self._read(file, offset, min(_COPIED_AT_ONCE, self.bytes - offset))

    def _read(self, file: BinaryIO, offset: int, count: int) -> bytearray:
        held = bytearray(count)
        file.seek(self.begin + offset)
        view = memoryview(held)
        while view:
            got = file.readinto(view)  # type: ignore[attr-defined]
            if not got:
                raise QuantizeError(
                    f"{self.file}: expected {count} bytes of {self.name}, found the file's end; was it changed meanwhile?"
                )
            view = view[got:]
        return held


def read_json(file: Path) -> dict[str, Any]:
    """The JSON object in `file`.

    Raises:
        QuantizeError: there is none.
    """
    try:
        found = json.loads(file.read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise QuantizeError(f"{file}: expected a JSON object, found: {error}") from error
    if not isinstance(found, dict):
        raise QuantizeError(f"{file}: expected a JSON object, found {type(found).__name__}")
    return found


def tensors(folder: Path) -> list[Tensor]:
    """All tensors of a checkpoint's files, in the order in which they stand there.

    Raises:
        QuantizeError: a header is no safetensors header, or two files have the same tensor.
    """
    found: dict[str, Tensor] = {}
    for file in _weight_files(folder):
        for tensor in _header(file):
            if tensor.name in found:
                raise QuantizeError(
                    f"{file}: {tensor.name} is in {found[tensor.name].file.name} too; leave one of the files"
                )
            found[tensor.name] = tensor
    return list(found.values())


def _weight_files(folder: Path) -> list[Path]:
    if not (folder / INDEX).is_file():
        files = sorted(folder.glob("*.safetensors"))
        if not files:
            raise QuantizeError(f"{folder}: expected weights as *.safetensors, found none")
        return files
    weight_map = read_json(folder / INDEX).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise QuantizeError(
            f"{folder / INDEX}: expected a weight_map from tensors to files, found none"
        )
    names = sorted({str(name) for name in weight_map.values()})
    for name in names:
        if Path(name).name != name or not (folder / name).is_file():
            raise QuantizeError(f"{folder / INDEX}: expected files of its folder, found {name!r}")
    return [folder / name for name in names]


def _header(file: Path) -> list[Tensor]:
    size = file.stat().st_size
    with file.open("rb") as opened:
        length = int.from_bytes(opened.read(8), "little")
        if size < 8 or length > min(size - 8, _MAX_HEADER):
            raise QuantizeError(
                f"{file}: expected a safetensors header within {size} bytes, found one of {length}; is the file whole?"
            )
        try:
            header = json.loads(opened.read(length))
        except (ValueError, RecursionError) as error:
            raise QuantizeError(f"{file}: expected a header in JSON, found: {error}") from error
    if not isinstance(header, dict):
        raise QuantizeError(f"{file}: expected a header of tensors, found {type(header).__name__}")
    found = [
        _tensor(file, name, entry, 8 + length, size)
        for name, entry in header.items()
        if name != "__metadata__"
    ]
    return sorted(found, key=lambda tensor: (tensor.begin, tensor.name))


def _tensor(file: Path, name: str, entry: object, data: int, size: int) -> Tensor:
    try:
        dtype, shape, (begin, end) = entry["dtype"], entry["shape"], entry["data_offsets"]  # type: ignore[index]
        whole = all(type(number) is int and number >= 0 for number in (*shape, begin, end))
        known = whole and end - begin == math.prod(shape) * ELEMENT_BYTES[dtype]
    except (LookupError, TypeError, ValueError) as error:
        raise QuantizeError(
            f"{file}: {name}: expected dtype, shape and data_offsets of a known type, found {str(entry)[:200]}"
        ) from error
    if not known or data + end > size:
        raise QuantizeError(
            f"{file}: {name}: expected data_offsets of the shape's size inside the file, found {str(entry)[:200]}"
        )
    return Tensor(name, file, dtype, tuple(shape), data + begin)


def header(entries: Mapping[str, tuple[str, tuple[int, ...]]]) -> tuple[bytes, dict[str, int]]:
    """The first bytes of a safetensors file with these tensors `(dtype, shape)`, and where each one's data begin in it.

    Laid out as the safetensors library does it, and then by name.
    """
    told: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    begins: dict[str, int] = {}
    offset = 0
    order = list(ELEMENT_BYTES)
    for name, (dtype, shape) in sorted(
        entries.items(), key=lambda item: (order.index(item[1][0]), item[0])
    ):
        end = offset + math.prod(shape) * ELEMENT_BYTES[dtype]
        told[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [offset, end]}
        begins[name] = offset
        offset = end
    text = json.dumps(told, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    first = 8 + len(text)
    return len(text).to_bytes(8, "little") + text, {name: first + at for name, at in begins.items()}


class Writer:
    """A safetensors file whose header is written at once and whose tensors come in pieces, in any order."""

    def __init__(self, file: Path, entries: Mapping[str, tuple[str, tuple[int, ...]]]) -> None:
        start, self._begins = header(entries)
        self._missing = {
            name: math.prod(shape) * ELEMENT_BYTES[dtype]
            for name, (dtype, shape) in entries.items()
        }
        self._file = file.open("wb")
        self._file.write(start)
        self._file.truncate(len(start) + sum(self._missing.values()))

    def write(self, name: str, offset: int, data: bytearray | bytes) -> None:
        """Puts `data` `offset` bytes into the tensor's."""
        self._missing[name] -= len(data)
        self._file.seek(self._begins[name] + offset)
        self._file.write(data)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._file.close()
        missing = {name: count for name, count in self._missing.items() if count}
        if kind is None and missing:
            raise RuntimeError(f"expected every tensor written once, found left over: {missing}")


def raw(tensor: torch.Tensor) -> bytearray:
    """The tensor's elements as they stand in a file, without numpy."""
    held = bytearray(tensor.numel() * tensor.element_size())
    if held:
        torch.frombuffer(held, dtype=tensor.dtype).copy_(tensor.reshape(-1))
    return held
