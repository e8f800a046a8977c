"""Medians, ratios and goals of `bench.cpu`'s runs, as Markdown. Arithmetic only: it measures nothing.

A run is the figures of one side in one round, with the bandwidths measured before and after it, and from `with_states` on the
state of memory. Sides are compared
by their medians over rounds in which memory was equally fast. A ratio above 1 is in our favour.
"""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

Run = Mapping[str, Any]
State = Literal["fast", "slow", "mixed"]

# A virtual machine's memory may have two speeds for two threads, by where the host puts them: 60 and 35 GB/s on one machine, 80
# and 50 on another. Bandwidths that differ by less than this are one speed.
ONE_SPEED = 1.25
NOTHING = "-"

FIGURES = {
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
"""What is known of a run: how it is called, and which way is better."""

COLUMNS = {
    "decode, tokens/s, behind 0 / 512 / 4096": ("decode_0", "decode_512", "decode_4096"),
    "prefill, tokens/s, of 64 / 512 / 2048": ("prefill_64", "prefill_512", "prefill_2048"),
    "load, s": ("load_seconds",),
    "to the first token (64), s, from load / from start": (
        "load_to_first_seconds",
        "start_to_first_seconds",
    ),
    "peak memory, GiB, with mapped pages / without": ("peak_gib", "anonymous_gib"),
    "memory read beside it, GB/s": ("bandwidth_gbs",),
}


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
    """Only rounds in which memory was in this state count."""

    @property
    def at_most(self) -> bool:
        """Whether the bar is an upper one."""
        return self.theirs is None or FIGURES[self.figure][1] == "lower"


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


def with_states(runs: Sequence[Run]) -> list[Run]:
    """The runs, each with the `state` memory was in around it: `mixed` when it changed meanwhile.

    The border is halfway between the lowest and the highest bandwidth of all runs; all are `fast` when these are one speed.
    """
    seen = [run[key] for run in runs for key in ("before_gbs", "after_gbs")]
    two_speeds = bool(seen) and max(seen) > ONE_SPEED * min(seen)
    border = (min(seen) + max(seen)) / 2 if two_speeds else 0.0

    def state_of(run: Run) -> State:
        fast = {run["before_gbs"] >= border, run["after_gbs"] >= border}
        return "mixed" if len(fast) == 2 else "fast" if fast.pop() else "slow"

    return [{**run, "state": state_of(run)} for run in runs]


def _median(runs: Sequence[Run], side: str, figure: str, state: State | None) -> float | None:
    values = [
        run[figure]
        for run in runs
        if run["side"] == side and figure in run and state in (None, run["state"])
    ]
    return statistics.median(values) if values else None


def ratios(runs: Sequence[Run], figure: str, ours: str, theirs: str) -> dict[str, float]:
    """How many times better `ours` was, for each state of memory in which both sides ran.

    Where they share none, over all rounds, under the name `states differ`.
    """
    found: dict[str, float] = {}
    states: dict[str, State | None] = {"fast": "fast", "slow": "slow", "states differ": None}
    for name, state in states.items():
        mine = _median(runs, ours, figure, state)
        other = _median(runs, theirs, figure, state)
        if mine and other and (state or not found):
            found[name] = mine / other if FIGURES[figure][1] == "higher" else other / mine
    return found


def found_for(goal: Goal, runs: Sequence[Run]) -> dict[str, float]:
    """The value that a goal's bar is for, by state of memory; empty when nothing was measured for it."""
    if goal.theirs:
        found = ratios(runs, goal.figure, goal.ours, goal.theirs)
        if goal.at_most:
            # Said the other way round: ours divided by theirs.
            found = {state: 1 / value for state, value in found.items()}
        return {state: found[state] for state in found if goal.state in (None, state)}
    own = [run for run in runs if run["side"] == goal.ours and goal.figure in run]
    values = [
        run[goal.behind] / run[goal.figure] if goal.behind else run[goal.figure] for run in own
    ]
    return {"all": statistics.median(values)} if values else {}


def is_reached(goal: Goal, found: Mapping[str, float]) -> bool:
    """Whether every value found is on the right side of the bar."""
    return all(value <= goal.bar if goal.at_most else value >= goal.bar for value in found.values())


def figures_table(runs: Sequence[Run], labels: Mapping[str, str]) -> str:
    """The medians over all rounds, one line for each side that ran."""
    shown = {
        title: figures
        for title, figures in COLUMNS.items()
        if any(figure in run for figure in figures for run in runs)
    }
    lines = [f"| | {' | '.join(shown)} | state |", f"|---|{'---|' * (len(shown) + 1)}"]
    for side, label in labels.items():
        own = [run for run in runs if run["side"] == side]
        if not own:
            continue
        cells = []
        for figures in shown.values():
            medians = [_median(own, side, figure, None) for figure in figures]
            cells.append(" / ".join(NOTHING if m is None else f"{m:.4g}" for m in medians))
        states = ", ".join(run["state"] for run in own)
        lines.append(f"| {label} | {' | '.join(cells)} | {states} |")
    return "\n".join(lines)


def goals_table(runs: Sequence[Run], labels: Mapping[str, str]) -> str:
    """Each goal with what was found."""
    lines = ["| goal | found | |", "|---|---|---|"]
    for goal in GOALS:
        found = found_for(goal, runs)
        values = ", ".join(
            f"{value:.2f}" if state == "all" else f"{value:.2f} ({state})"
            for state, value in found.items()
        )
        verdict = "not measured"
        if found:
            verdict = "reached" if is_reached(goal, found) else "missed"
        against = f" against {labels[goal.theirs]}" if goal.theirs else ""
        state = f", {goal.state} memory" if goal.state else ""
        bar = f"{'≤' if goal.at_most else '≥'} {goal.bar}"
        what = f"{labels[goal.ours]}: {goal.what}{against}{state} {bar}"
        lines.append(f"| {what} | {values or NOTHING} | {verdict} |")
    return "\n".join(lines)


def table(runs: Sequence[Run], labels: Mapping[str, str], not_run: Mapping[str, str]) -> str:
    """Everything, with the sides that did not run and why."""
    runs = with_states(runs)
    parts = [figures_table(runs, labels), goals_table(runs, labels)]
    if not_run:
        parts.append("\n".join(f"not run: {labels[side]}: {why}" for side, why in not_run.items()))
    return "\n\n".join(parts)
