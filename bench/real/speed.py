"""How fast the real model is on a CPU: the same GGUF file in llama.cpp, mistral.rs and here, and its values in transformers and mistral.rs.

    python -m bench.real.speed [--rounds 5] [--sides ours llama ...] [--out bench/results/real-speed.json]

As `bench.cpu`, whose processes and figures these are: each measurement is a process of its own, sides in turn, memory's read bandwidth
beside each.
"""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from bench.cpu import install
from bench.cpu import llama as llama_bench
from bench.cpu.__main__ import run_all
from bench.cpu.plan import Plan
from bench.cpu.sides import Ready, Side, of_python
from bench.cpu.table import figures_table, ratios, with_states
from bench.process import ProcessError
from bench.real import forms, mistralrs

PLAN = Plan(prefills=(64, 512), depths=(0, 512), tokens=64)
HERE = [sys.executable, "-m", "bench.engines"]


def _ours(path: Path) -> Ready:
    return of_python(path, [*HERE, "fast"])


def _llama(file: Path) -> Ready:
    return Ready([file], llama_bench.LlamaBench(install.llama(), file).measure)


SIDES = {
    "ours": Side("torchtpu_rs, Q4_K_M", lambda: _ours(forms.packaged())),
    "ours_w4a16": Side("torchtpu_rs, W4A16", lambda: _ours(forms.packed("w4a16"))),
    "ours_q4_0": Side("torchtpu_rs, Q4_0", lambda: _ours(forms.llama("Q4_0"))),
    "llama": Side("llama.cpp, Q4_K_M", lambda: _llama(forms.packaged())),
    "llama_q4_0": Side("llama.cpp, Q4_0", lambda: _llama(forms.llama("Q4_0"))),
    "transformers": Side(
        "transformers, bf16", lambda: of_python(forms.dense(), [*HERE, "transformers"])
    ),
    "mistralrs": Side("mistral.rs, Q4_K_M", lambda: mistralrs.prepare("gguf", forms.packaged())),
    "mistralrs_f32": Side(
        "mistral.rs, f32", lambda: mistralrs.prepare("gemma3_f32", forms.dense())
    ),
    "mistralrs_bf16": Side(
        "mistral.rs, bf16", lambda: mistralrs.prepare("gemma3_bf16", forms.dense())
    ),
    "mistralrs_q4k": Side(
        "mistral.rs, Q4K made at load", lambda: mistralrs.prepare("gemma3_q4k", forms.dense())
    ),
}
PAIRS = (
    ("ours", "llama"),
    ("ours_w4a16", "llama"),
    ("ours_q4_0", "llama_q4_0"),
    ("ours", "transformers"),
    ("ours", "mistralrs"),
)


def main() -> None:
    """Reads the command line, measures, prints, writes."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--sides", nargs="+", choices=list(SIDES), default=list(SIDES))
    parser.add_argument("--out", type=Path, default=Path("bench/results/real-speed.json"))
    arguments = parser.parse_args()
    ready: dict[str, Ready] = {}
    not_run: dict[str, str] = {}
    for name in arguments.sides:
        try:
            ready[name] = SIDES[name].prepare()
        except ProcessError as error:
            not_run[name] = str(error)
    runs: list[dict[str, Any]] = []

    def write() -> None:
        arguments.out.write_text(json.dumps({"not_run": not_run, "runs": runs}, indent=1) + "\n")

    for run in run_all(ready, not_run, arguments.rounds, PLAN):
        runs.append(run)
        write()
    # Once more, for sides that failed after the last run or before any.
    write()
    judged = with_states(runs)
    labels = {name: side.label for name, side in SIDES.items()}
    print(figures_table(judged, labels))
    for ours, theirs in PAIRS:
        if {ours, theirs} <= {run["side"] for run in runs}:
            for figure in ("decode_0", "decode_512", "prefill_64", "prefill_512"):
                print(
                    f"{labels[ours]} / {labels[theirs]}, {figure}: {ratios(judged, figure, ours, theirs)}"
                )
    for name, reason in not_run.items():
        print(f"not run: {labels[name]}: {reason}")


if __name__ == "__main__":
    main()
