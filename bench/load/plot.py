"""Draws results of `torchtpu-rs bench`: throughput and latency over the load. `python -m bench.load.plot OUT.svg RESULT.json…`

matplotlib is imported when something is drawn; the rest of the benchmark works without.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bench.load.result import read
from bench.load.wire import BenchmarkError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from bench.load.figures import Figures, Spread
    from bench.load.result import Result

COLORS = ("#2a6f97", "#c1666b", "#5b8c5a", "#8d6a9f")
# Text stays text, and the same results give the same file.
STYLE = {"svg.fonttype": "none", "svg.hashsalt": "bench.load", "font.size": 9}
MILLI = 1e3
SOLID, DASHED = "-", (0, (3, 2))


def check() -> None:
    """Nothing where plots can be drawn.

    Raises:
        BenchmarkError: matplotlib is not installed.
    """
    if importlib.util.find_spec("matplotlib") is None:
        raise BenchmarkError(
            "expected matplotlib, which draws the plot, found none; install it: pip install matplotlib"
        )


def draw(results: Mapping[str, Result], out: Path) -> None:
    """Writes a figure of results, by the names they are to have, to `out`; its ending names the format.

    Raises:
        BenchmarkError: matplotlib is not installed, or the results have no load or loads of two kinds.
    """
    check()
    kinds = {level.load.kind for one in results.values() for level in one.levels}
    if len(kinds) != 1:
        raise BenchmarkError(
            "expected results with levels of load of one kind, closed or open, found "
            + (" and ".join(sorted(kinds)) or "none")
        )
    import matplotlib as mpl
    from matplotlib.figure import Figure

    with mpl.rc_context(STYLE):  # type: ignore[arg-type]
        figure = Figure(figsize=(11, 3.4), layout="constrained")
        panels = figure.subplots(1, 3)
        for axes, (title, solid, dashed) in zip(panels, PANELS, strict=True):
            for (name, result), color in zip(results.items(), COLORS * len(results), strict=False):
                _line(axes, result, solid, color, SOLID, name)
                _line(axes, result, dashed, color, DASHED, None)
            _frame(axes, title, "callers" if kinds == {"closed"} else "requests a second")
            sizes = {level.load.size for one in results.values() for level in one.levels}
            axes.set_xticks(sorted(sizes), [f"{size:g}" for size in sorted(sizes)])
        if len(results) > 1:
            panels[0].legend(frameon=False)
        figure.savefig(out, metadata={"Date": None} if out.suffix == ".svg" else None)


def _line(
    axes: Any,
    result: Result,
    value: Callable[[Figures], float | None],
    color: str,
    style: Any,
    name: str | None,
) -> None:
    points = [
        (level.load.size, found)
        for level in result.levels
        if (found := value(level.figures)) is not None
    ]
    axes.plot(
        [size for size, _ in points],
        [found for _, found in points],
        color=color,
        linestyle=style,
        marker="o",
        markersize=4,
        label=name,
    )


def _frame(axes: Any, title: str, below: str) -> None:
    axes.set_title(title, loc="left", fontsize=10)
    axes.set_xlabel(below)
    axes.set_xscale("log", base=2)
    axes.minorticks_off()
    axes.set_ylim(bottom=0)
    axes.margins(x=0.08)
    axes.grid(axis="y", color="#e3e6e8", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)


def _of(name: str, share: str, scale: float) -> Callable[[Figures], float | None]:
    def value(figures: Figures) -> float | None:
        spread: Spread | None = getattr(figures, name)
        return getattr(spread, share) * scale if spread else None

    return value


PANELS: tuple[tuple[str, Callable[[Figures], float | None], Callable[[Figures], float | None]], ...]
PANELS = (
    (
        "Tokens a second: all, each caller's (dashed)",
        lambda figures: figures.tokens_per_second if figures.completed else None,
        _of("request_tokens_per_second", "p50", 1),
    ),
    (
        "First token, ms: p50, p99 (dashed)",
        _of("first_token_seconds", "p50", MILLI),
        _of("first_token_seconds", "p99", MILLI),
    ),
    (
        "Between pieces of text, ms: p50, p99 (dashed)",
        _of("piece_gap_seconds", "p50", MILLI),
        _of("piece_gap_seconds", "p99", MILLI),
    ),
)


def main() -> None:
    """Reads the command line and draws."""
    import argparse

    parser = argparse.ArgumentParser(description="Draw results of torchtpu-rs bench.")
    parser.add_argument("out", type=Path)
    parser.add_argument("results", type=Path, nargs="+")
    arguments = parser.parse_args()
    draw({file.stem: read(file) for file in arguments.results}, arguments.out)


if __name__ == "__main__":
    main()
