"""`torchtpu-rs quantize`: its options, what a terminal shows meanwhile and what is said at the end. `quantize/` does the work."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path  # noqa: TC003 - typer reads the annotations when it runs
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from server.checkpoint import resolve
from server.exits import fail

if TYPE_CHECKING:
    from collections.abc import Iterator

    from quantize import Summary

app = typer.Typer()


class Format(StrEnum):
    """What a checkpoint can become."""

    W4A16 = "w4a16"
    INT8 = "int8"
    EMB4 = "emb4"


@app.command()
def quantize(
    source: Annotated[
        str,
        typer.Argument(metavar="IN", help="Checkpoint folder or Hub id, as serve takes it."),
    ],
    out: Annotated[Path, typer.Argument(metavar="OUT", help="A new folder.")],
    form: Annotated[
        Format,
        typer.Option(
            "--format",
            help="w4a16: projections in 4 bits, groups of 32. int8: in 8 bits, likewise. emb4: w4a16 and the vocabulary tables.",
        ),
    ] = Format.W4A16,
    force: Annotated[
        bool, typer.Option("--force", help="Replace the checkpoint that is in OUT.")
    ] = False,
) -> None:
    """Write a checkpoint's weights packed in four or eight bits (compressed-tensors)."""
    from quantize import convert

    console = Console(stderr=True)
    bars = Progress(
        TextColumn("packing"),
        BarColumn(),
        DownloadColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        console=console,
        disable=not console.is_terminal,
    )
    try:
        folder = resolve(source, console=console)[0]
        with bars:
            task = bars.add_task("packing", total=None)
            summary = convert(
                folder,
                out,
                form,
                force=force,
                progress=lambda done, total: bars.update(task, completed=done, total=total),
            )
    except (OSError, ValueError) as error:
        fail(str(error))
    for line in _lines(summary, form):
        typer.echo(line)


def _lines(summary: Summary, form: Format) -> Iterator[str]:
    yield (
        f"{summary.out}: {summary.source_bytes / 1e9:.3f} GB are {summary.written_bytes / 1e9:.3f} GB as {form}; "
        f"{summary.packed_weights:,} weights packed"
    )
    share = summary.lossless / summary.groups
    yield f"relative error {summary.relative_error:.4f}; {share:.1%} of {summary.groups:,} groups are read back bit for bit"
    if summary.left:
        yield f"{len(summary.left)} projections have no whole groups of columns and stay as they are, the first {summary.left[0]}"
    if summary.dropped:
        yield f"{len(summary.dropped)} tensors that no layer reads (keys and values of layers that share another's) are left out"
    if summary.expert_weights:
        yield (
            f"{summary.expert_weights:,} of the packed weights are experts', three projections each, as vLLM reads them; "
            "transformers puts random weights in their place unless it is told their names (README.md)"
        )
    if form is Format.EMB4:
        yield "transformers reads packed tables only with quantization_config=CompressedTensorsConfig(dequantize=True)"
