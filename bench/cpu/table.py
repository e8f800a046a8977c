"""Medians, ratios and goals of `bench.cpu`'s runs, as Markdown. Arithmetic only: it measures nothing.

A run is the figures of one side in one round, with the bandwidths measured before and after it. Ratios are taken
within a round, where both sides ran minutes apart, and their median is shown. Above 1 they are in our favour.
"""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

Run = Mapping[str, Any]
State = Literal["fast", "slow", "mixed"]

# A virtual machine's memory may have two speeds for two threads, about 60 and 35 GB/s, by where the host puts them.
FAST_GBS = 48
NOTHING = "-"

ROWS = {
    "decode_0": ("decode from nothing, tokens/s", "higher"),
    "decode_512": ("decode behind 512, tokens/s", "higher"),
    "decode_4096": ("decode behind 4096, tokens/s", "higher"),
    "prefill_64": ("prefill of 64, tokens/s", "higher"),
    "prefill_512": ("prefill of 512, tokens/s", "higher"),
    "prefill_2048": ("prefill of 2048, tokens/s", "higher"),
    "load_seconds": ("load, s", "lower"),
    "load_to_first_seconds": ("load to first token (64), s", "lower"),
    "start_to_first_seconds": ("process start to first token (64), s", "lower"),
    "peak_gib": ("peak memory with mapped pages, GiB", "lower"),
    "anonymous_gib": ("of it no pages of files, GiB", "lower"),
}
"""What is shown of a run: its label, and which way is better."""


@dataclass(frozen=True)
class Goal:
    """A figure of ours that must be reached, against another side, another figure of ours, or by itself."""

    what: str
    figure: str
    ours: str
    bar: float
    theirs: str | None = None
    behind: str | None = None
    """A figure of ours: its value divided by `figure` must be at most `bar`."""
    state: State | None = None
    """Only rounds in which the memory was in this state for both count."""


def _decode(bar: float, ours: str, theirs: str, state: State | None = None) -> Goal:
    return Goal("decode from nothing", "decode_0", ours, bar, theirs, state=state)


GOALS = (
    _decode(1.6, "ours_w4a16", "llama_q4_0", "fast"),
    _decode(1.2, "ours_w4a16", "llama_q4_0", "slow"),
    _decode(1.25, "ours_w4a16_bf16_head", "llama_q4_0", "fast"),
    _decode(1.15, "ours_bf16", "llama_bf16"),
    _decode(3.0, "ours_bf16", "transformers_bf16"),
    Goal("prefill of 512", "prefill_512", "ours_w4a16", 1.1, "vllm_bf16"),
    Goal("prefill of 512", "prefill_512", "ours_w4a16", 1.25, "transformers_bf16"),
    Goal("slower behind 4096", "decode_4096", "ours_w4a16", 1.25, behind="decode_0"),
    Goal("peak memory", "peak_gib", "ours_w4a16", 1.0, "llama_q4_0"),
    Goal("load to first token, s", "load_to_first_seconds", "ours_w4a16", 2.0),
)


def state_of(run: Run) -> State:
    """How fast memory was around a run; `mixed` when it changed meanwhile."""
    fast = {run["before_gbs"] >= FAST_GBS, run["after_gbs"] >= FAST_GBS}
    return "mixed" if len(fast) == 2 else "fast" if fast.pop() else "slow"


def ratios(
    runs: Sequence[Run], figure: str, ours: str, theirs: str, state: State | None = None
) -> list[float]:
    """Of each round that has both sides: how many times better `ours` was."""
    found = []
    for mine in runs:
        for other in runs:
            same_round = mine["round"] == other["round"]
            if not same_round or (mine["side"], other["side"]) != (ours, theirs):
                continue
            if state and {state_of(mine), state_of(other)} != {state}:
                continue
            if figure in mine and figure in other:
                better = mine[figure] / other[figure]
                found.append(better if ROWS[figure][1] == "higher" else 1 / better)
    return found


def reached(goal: Goal, runs: Sequence[Run]) -> tuple[float, bool] | None:
    """The median figure of a goal and whether it is enough; None when nothing was measured for it."""
    if goal.theirs:
        values = ratios(runs, goal.figure, goal.ours, goal.theirs, goal.state)
        if not values:
            return None
        ratio = statistics.median(values)
        # Memory is judged the way it is said: ours divided by theirs, and at most the bar.
        if ROWS[goal.figure][1] == "lower":
            return 1 / ratio, 1 / ratio <= goal.bar
        return ratio, ratio >= goal.bar
    own = [run for run in runs if run["side"] == goal.ours and goal.figure in run]
    if not own:
        return None
    divided = [
        run[goal.behind] / run[goal.figure] if goal.behind else run[goal.figure] for run in own
    ]
    value = statistics.median(divided)
    return value, value <= goal.bar


def medians(runs: Sequence[Run], side: str) -> dict[str, float]:
    """Each figure's median over the rounds of a side."""
    own = [run for run in runs if run["side"] == side]
    return {
        figure: statistics.median(run[figure] for run in own if figure in run)
        for figure in [*ROWS, "bandwidth_gbs"]
        if any(figure in run for run in own)
    }


def figures_table(runs: Sequence[Run], labels: Mapping[str, str]) -> str:
    """One row for each figure and one column for each side that ran."""
    columns = {side: medians(runs, side) for side in labels if any(r["side"] == side for r in runs)}
    lines = [
        f"| | {' | '.join(labels[side] for side in columns)} |",
        f"|---|{'---|' * len(columns)}",
    ]
    rows = {**ROWS, "bandwidth_gbs": ("memory read beside it, GB/s", "")}
    for figure, (label, _) in rows.items():
        cells = [
            f"{found[figure]:.2f}" if figure in found else NOTHING for found in columns.values()
        ]
        if set(cells) != {NOTHING}:
            lines.append(f"| {label} | {' | '.join(cells)} |")
    states = ["/".join(state_of(run) for run in runs if run["side"] == side) for side in columns]
    lines.append(f"| state of memory, by round | {' | '.join(states)} |")
    return "\n".join(lines)


def goals_table(runs: Sequence[Run], labels: Mapping[str, str]) -> str:
    """Each goal with what was found."""
    lines = ["| goal | found | |", "|---|---|---|"]
    for goal in GOALS:
        at_least = goal.theirs and ROWS[goal.figure][1] == "higher"
        against = f" against {labels[goal.theirs]}" if goal.theirs else ""
        state = f", {goal.state} memory" if goal.state else ""
        found = reached(goal, runs)
        value, verdict = (
            (f"{found[0]:.2f}", "reached" if found[1] else "missed")
            if found
            else (NOTHING, "not measured")
        )
        sign = "≥" if at_least else "≤"
        what = f"{labels[goal.ours]}: {goal.what}{against}{state} {sign} {goal.bar}"
        lines.append(f"| {what} | {value} | {verdict} |")
    return "\n".join(lines)


def table(runs: Sequence[Run], labels: Mapping[str, str], not_run: Mapping[str, str]) -> str:
    """Everything, with the sides that did not run and why."""
    parts = [figures_table(runs, labels), goals_table(runs, labels)]
    if not_run:
        parts.append("\n".join(f"not run: {labels[side]}: {why}" for side, why in not_run.items()))
    return "\n\n".join(parts)
