"""Draws the results of `bench.cpu`: `python -m bench.cpu.plot [bench/results/cpu.json]` writes an SVG file beside it.

A bar is a side's median, a dot one of its rounds.
"""

import argparse
import json
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from bench.cpu.table import FIGURES, Run

PANELS = (
    "decode_0",
    "decode_4096",
    "prefill_512",
    "prefill_2048",
    "load_to_first_seconds",
    "peak_gib",
)
COLUMNS = 2
OURS, THEIRS, DOT = "#2a6f97", "#c3c8cd", "#1b1b1b"
# Text stays text, and the same results give the same file.
STYLE = {"svg.fonttype": "none", "svg.hashsalt": "bench.cpu", "font.size": 9}


def _panel(axes: Axes, figure: str, runs: Sequence[Run], sides: Sequence[str]) -> None:
    for row, side in enumerate(sides):
        values = [run[figure] for run in runs if run["side"] == side and figure in run]
        if not values:
            continue
        middle = statistics.median(values)
        axes.barh(row, middle, color=OURS if side.startswith("ours") else THEIRS)
        axes.plot(values, [row] * len(values), ".", color=DOT, markersize=4)
        axes.annotate(
            f"{middle:.3g}",
            (max(values), row),
            xytext=(5, 0),
            textcoords="offset points",
            va="center",
        )
    label, better = FIGURES[figure]
    axes.set_title(f"{label} ({better} is better)", loc="left", fontsize=10)
    axes.margins(x=0.15)
    axes.spines[["top", "right"]].set_visible(False)


def draw(runs: Sequence[Run], labels: Mapping[str, str], out: Path) -> None:
    """Writes the figure to `out`; its ending names the format."""
    ran = {run["side"] for run in runs}
    sides = [side for side in labels if side in ran]
    shown = [figure for figure in PANELS if any(figure in run for run in runs)]
    rows = -(-len(shown) // COLUMNS)
    with mpl.rc_context(STYLE):  # type: ignore[arg-type]
        figure = Figure(figsize=(11, rows * (0.8 + 0.26 * len(sides))), layout="constrained")
        grid = figure.subplots(rows, COLUMNS, sharey=True, squeeze=False)
        for axes in grid.flat[len(shown) :]:
            axes.set_visible(False)
        for axes, name in zip(grid.flat, shown, strict=False):
            _panel(axes, name, runs, sides)
        grid[0][0].set_yticks(range(len(sides)), [labels[side] for side in sides])
        grid[0][0].invert_yaxis()
        figure.savefig(out, metadata={"Date": None} if out.suffix == ".svg" else None)


def main() -> None:
    """Reads the command line and draws."""
    parser = argparse.ArgumentParser(description="Draw the results of bench.cpu.")
    parser.add_argument("results", type=Path, nargs="?", default=Path("bench/results/cpu.json"))
    arguments = parser.parse_args()
    results = json.loads(arguments.results.read_text())
    draw(results["runs"], results["labels"], arguments.results.with_suffix(".svg"))


if __name__ == "__main__":
    main()
