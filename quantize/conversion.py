"""A checkpoint's folder → a packed one: checks first, then slice after slice into a folder beside OUT, moved there when whole.

Memory holds one slice of rows, whatever the checkpoint's size. A run that breaks off leaves OUT as it was. The same input gives the same bytes.
"""

from __future__ import annotations

import json
import math
import os
import shutil
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from quantize import files, grid, plan
from quantize.files import QuantizeError

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from quantize.plan import Job, Plan

SHARD_BYTES = 5 * 10**9
"""Larger checkpoints are several files, as transformers writes them."""
COPIED = (
    "generation_config.json", "tokenizer*", "special_tokens_map.json", "added_tokens.json", "chat_template.*",
    "*processor_config.json", "LICENSE*", "NOTICE*", "USE_POLICY*",
)  # fmt: skip
# Elements packed at once: some ten copies of them in float32 are in memory.
_SLICE = 1 << 19


@dataclass
class Summary:
    """What was done."""

    out: Path
    source_bytes: int
    """Of all tensors that were read."""
    written_bytes: int = 0
    packed_weights: int = 0
    groups: int = 0
    lossless: int = 0
    """Groups that are read back bit for bit."""
    squared_error: float = 0.0
    squared_weights: float = 0.0
    left: list[str] = field(default_factory=list)
    """Projections whose columns are no whole groups; they stay as they are."""
    dropped: list[str] = field(default_factory=list)
    """Keys and values that no layer reads; they are left out."""
    expert_weights: int = 0
    """Packed weights that are experts'."""

    @property
    def relative_error(self) -> float:
        """Root of the squared error over the squared weights, of what was packed."""
        return (
            float((self.squared_error / self.squared_weights) ** 0.5)
            if self.squared_weights
            else 0.0
        )


def convert(
    source: Path,
    out: Path,
    form: str,
    *,
    force: bool = False,
    shard_bytes: int = SHARD_BYTES,
    progress: Callable[[int, int], None] = lambda _done, _total: None,
) -> Summary:
    """Packs the checkpoint in `source` as `form` (a key of `plan.FORMATS`) into the new folder `out`.

    `progress` is called with bytes read and all of them. `force` replaces a checkpoint that is in `out`.

    Raises:
        QuantizeError: the checkpoint cannot be packed, `out` is in use, or there is no space for it.
        OSError: a file cannot be read or written.
    """
    if form not in plan.FORMATS:
        raise QuantizeError(f"format: expected {', '.join(plan.FORMATS)}, found {form!r}")
    out = out.expanduser().resolve()
    _check_places(source.resolve(), out, force=force)
    made = plan.make(
        files.read_json(source / "config.json"), files.tensors(source), plan.FORMATS[form]
    )
    shards = _shards(made.jobs, shard_bytes)
    _check_space(out, sum(job.written_bytes for job in made.jobs))
    partial = out.with_name(f".{out.name}.{os.getpid()}.partial")
    partial.mkdir(parents=True)
    try:
        summary = _write(partial, source, made, shards, progress)
        _move(partial, out)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    summary.out = out
    return summary


def _check_places(source: Path, out: Path, *, force: bool) -> None:
    if out == source or out in source.parents:
        raise QuantizeError(f"{out}: expected a folder apart from the checkpoint's own, {source}")
    if not out.exists():
        return
    if not out.is_dir():
        raise QuantizeError(f"{out}: expected a new folder, found a file; name another")
    if not any(out.iterdir()):
        return
    if not force:
        raise QuantizeError(
            f"{out}: expected a new or an empty folder, found files in it; name another, or replace it with --force"
        )
    if not (out / "config.json").is_file():
        raise QuantizeError(
            f"{out}: expected a checkpoint to replace, found a folder without config.json; remove it yourself or name another"
        )


def _check_space(out: Path, needed: int) -> None:
    existing = next(parent for parent in out.parents if parent.exists())
    free = shutil.disk_usage(existing).free
    if free < needed:
        raise QuantizeError(
            f"{existing}: expected {needed / 1e9:.2f} GB of free space for the packed checkpoint, found {free / 1e9:.2f} GB; "
            "free some, or name a folder on another disk"
        )


def _shards(jobs: list[Job], limit: int) -> list[list[Job]]:
    """Jobs in their order, cut where a file would grow past `limit` bytes."""
    shards: list[list[Job]] = [[]]
    held = 0
    for job in jobs:
        size = job.written_bytes
        if shards[-1] and held + size > limit:
            shards.append([])
            held = 0
        shards[-1].append(job)
        held += size
    return shards


def _write(
    folder: Path,
    source: Path,
    made: Plan,
    shards: list[list[Job]],
    progress: Callable[[int, int], None],
) -> Summary:
    summary = Summary(
        out=folder,
        source_bytes=sum(job.source.bytes for job in made.jobs),
        left=made.left,
        dropped=made.dropped,
    )
    done = 0

    def read(count: int) -> None:
        nonlocal done
        done += count
        progress(done, summary.source_bytes)

    read(0)
    weight_map: dict[str, str] = {}
    for number, shard in enumerate(shards, 1):
        one = len(shards) == 1
        name = "model.safetensors" if one else f"model-{number:05}-of-{len(shards):05}.safetensors"
        entries = {key: entry for job in shard for key, entry in job.outputs().items()}
        weight_map |= dict.fromkeys(entries, name)
        with files.Writer(folder / name, entries) as writer:
            for job in shard:
                _copy(job, writer, read) if job.packing is None else _pack(
                    job, writer, summary, read
                )
    summary.written_bytes = sum(job.written_bytes for job in made.jobs)
    if len(shards) > 1:
        index = {"metadata": {"total_size": summary.written_bytes}, "weight_map": weight_map}
        (folder / files.INDEX).write_text(json.dumps(index, indent=2, sort_keys=True) + "\n")
    (folder / "config.json").write_text(json.dumps(made.config, indent=2) + "\n")
    for file in sorted({file for pattern in COPIED for file in source.glob(pattern)}):
        if file.is_file():
            shutil.copyfile(file, folder / file.name)
    return summary


def _copy(job: Job, writer: files.Writer, read: Callable[[int], None]) -> None:
    for offset, piece in job.source.pieces():
        writer.write(job.source.name, offset, piece)
        read(len(piece))


def _pack(job: Job, writer: files.Writer, summary: Summary, read: Callable[[int], None]) -> None:
    packing = job.packing
    assert packing is not None
    rows, columns = job.shape
    groups = packing.groups(columns)
    for block, first, weight in job.source.rows(_SLICE, len(job.modules)):
        modules = job.modules[block]
        packed = grid.pack(weight, packing, files.DTYPES[job.scale_dtype])
        if not math.isfinite(packed.squared_error):
            raise QuantizeError(
                f"{job.source.name}: expected finite weights, found NaN or infinity, or values past {job.scale_dtype}, "
                f"in rows {first} to {first + len(weight) - 1} of {modules[0]}"
            )
        words, scale = files.raw(packed.words), files.raw(packed.scale)
        row_words, row_scale = len(words) // len(weight), len(scale) // len(weight)
        for module in modules:
            writer.write(f"{module}.weight_packed", first * row_words, words)
            writer.write(f"{module}.weight_scale", first * row_scale, scale)
        summary.groups += len(weight) * groups
        summary.lossless += packed.lossless
        summary.squared_error += packed.squared_error
        summary.squared_weights += packed.squared_weights
        read(weight.numel() * weight.element_size())
    weights = len(job.modules) * rows * columns
    summary.packed_weights += weights
    summary.expert_weights += weights if job.is_experts else 0
    shape = files.raw(torch.tensor([rows, columns], dtype=torch.int64))
    for module in job.written_modules:
        writer.write(f"{module}.weight_shape", 0, shape)


def _move(whole: Path, out: Path) -> None:
    """Puts the folder `whole` in the place of `out`."""
    if not out.exists():
        whole.rename(out)
        return
    old = whole.with_suffix(".old")
    out.rename(old)
    try:
        whole.rename(out)
    except OSError:
        old.rename(out)
        raise
    shutil.rmtree(old)
