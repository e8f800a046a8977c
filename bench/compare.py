"""Decode and prefill speed at E2B's size, ours against transformers, in turn on one machine.

    python -m bench.compare [CHECKPOINT] [--rounds 3] [--out bench/results/compare.json]
    python -m bench.compare --w4a16      # four-bit weights: multiplied as they are against unpacked, both ours

Each measurement is a process of its own; between two of them the memory's read bandwidth is measured,
because on a shared machine it changes from minute to minute and decides the decode speed. The floor is
what a step must read (`WEIGHTS`) at that bandwidth. Prints a table and writes the JSON it is made from.
"""

import argparse
import json
import platform
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch

import torchtpu_rs
from bench import e2b_shape, process
from bench.e2b_shape import prompt
from bench.measures import Job

PREFILLS = (64, 512)
DECODE_FROM, DECODE_TOKENS = 64, 24
# Bytes of weights that one decode step reads: E2B's linear layers and the tied head in bfloat16
# (1,876,819,968 + 402,653,184 weights), plus one row of the per-layer table.
WEIGHTS = 1_876_819_968 + 402_653_184 + 8_960
# Of one weight: two bytes, or four bits and a factor of two bytes for 32.
BYTES = {"bf16": 2.0, "w4a16": 0.5 + 2 / 32}
SIDES = {"bf16": ("exact", "transformers"), "w4a16": ("fast", "exact")}
METRICS = {
    "decode": ("decode, tokens/s", "higher"),
    "prefill_64": ("prefill of 64, tokens/s", "higher"),
    "prefill_512": ("prefill of 512, tokens/s", "higher"),
    "load_seconds": ("load, s", "lower"),
    "first_token_seconds": ("first token after load (64), s", "lower"),
    "peak_gib": ("peak memory with mapped pages, GiB", "lower"),
}


def read_bandwidth() -> float:
    """GB/s at which all threads read a gibibyte that no cache holds; the best of five."""
    data = torch.ones(1 << 27, dtype=torch.int64)
    best = 0.0
    for _ in range(5):
        begun = time.perf_counter()
        data.sum()
        best = max(best, data.nbytes / (time.perf_counter() - begun) / 1e9)
    return best


def one_side(side: str, folder: Path) -> dict[str, float]:
    """The measurements of a process of its own."""
    job = Job(
        checkpoint=str(folder),
        first=prompt(64),
        prefill={f"prefill_{tokens}": prompt(tokens) for tokens in PREFILLS},
        decode={"decode": prompt(DECODE_FROM)},
        decode_tokens=DECODE_TOKENS,
        context=1024,
    )
    return process.run_job([sys.executable, "-m", "bench.engines", side], job)


def run_sides(folder: Path, rounds: int, both: tuple[str, str]) -> list[dict[str, Any]]:
    """Both sides in turn, each with the bandwidth measured before and after it."""
    runs = []
    before = read_bandwidth()
    for number in range(rounds):
        # The order changes, so that a drift of the machine favours neither.
        for side in both[:: 1 if number % 2 == 0 else -1]:
            figures = one_side(side, folder)
            after = read_bandwidth()
            runs.append(
                {"round": number, "side": side, "bandwidth_gbs": (before + after) / 2, **figures}
            )
            print(
                f"round {number} {side:12s} {before:.0f}-{after:.0f} GB/s " + json.dumps(figures),
                flush=True,
            )
            before = after
    return runs


def table(runs: list[dict[str, Any]], form: str) -> str:
    """Medians of both sides, and the median of the rounds' ratios, as Markdown."""
    sides = {side: [run for run in runs if run["side"] == side] for side in SIDES[form]}
    lines = [f"| | {' | '.join(sides)} | ratio |", "|---|---|---|---|"]
    step_bytes = WEIGHTS * BYTES[form]
    for key, (label, better) in METRICS.items():
        ours, theirs = ([run[key] for run in side] for side in sides.values())
        ratios = [a / b if better == "higher" else b / a for a, b in zip(ours, theirs, strict=True)]
        medians = [statistics.median(values) for values in (ours, theirs, ratios)]
        lines.append(f"| {label} | {medians[0]:.2f} | {medians[1]:.2f} | {medians[2]:.2f} |")
    bandwidth = statistics.median(run["bandwidth_gbs"] for run in runs)
    lines.append("")
    lines.append(
        f"Read bandwidth beside it {bandwidth:.0f} GB/s (median); a decode step reads {step_bytes / 1e9:.2f} GB, "
        f"so the floor is {bandwidth * 1e9 / step_bytes:.1f} tokens/s. Ratios above 1 are in our favour."
    )
    return "\n".join(lines)


def main() -> None:
    """Reads the command line, measures, prints, writes."""
    parser = argparse.ArgumentParser(description="Compare speed with transformers.")
    parser.add_argument("checkpoint", type=Path, nargs="?")
    parser.add_argument("--w4a16", action="store_true", help="a four-bit checkpoint, two ways")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    form = "w4a16" if arguments.w4a16 else "bf16"
    folder = arguments.checkpoint or e2b_shape.scratch(form)
    e2b_shape.make(folder, w4a16=arguments.w4a16)
    runs = run_sides(folder, arguments.rounds, SIDES[form])
    machine = {
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "machine": platform.machine(),
        "build": torchtpu_rs.BUILD,
    }
    name = "compare_w4a16.json" if arguments.w4a16 else "compare.json"
    out = arguments.out or Path("bench/results") / name
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps({"machine": machine, "runs": runs}, indent=1) + "\n")
    print(table(runs, form))


if __name__ == "__main__":
    main()
