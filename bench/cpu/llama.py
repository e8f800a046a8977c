"""llama.cpp as `bench.cpu` measures it: its GGUF files, and runs of its own `llama-bench`.

The files come from the bfloat16 checkpoint; `llama-quantize` makes the four-bit ones.
"""

import json
import os
import sys
from dataclasses import dataclass
from pathlib import Path

from bench import e2b_shape, process
from bench.cpu import install
from bench.cpu.plan import FIRST, Plan


def gguf(sources: Path, dense: Path, form: str, *options: str) -> Path:
    """The checkpoint `dense` as a GGUF file, made once: `bf16`, or Q4_0 with options of `llama-quantize`.

    Raises:
        process.ProcessError: llama.cpp's tools cannot make it.
    """
    out = e2b_shape.scratch(f"{form}.gguf")
    if out.is_file():
        return out
    part = out.with_suffix(".part")
    log = install.peers() / f"gguf-{form}.log"
    if form == "bf16":
        process.run(
            [sys.executable, "-m", "bench.cpu.gguf_shape", dense, part],
            environment={"PYTHONPATH": f"{sources / 'gguf-py'}{os.pathsep}{process.ROOT}"},
            log=log,
        )
    else:
        whole = gguf(sources, dense, "bf16")
        quantize = sources / "build" / "bin" / "llama-quantize"
        process.run([quantize, *options, whole, part, "Q4_0"], log=log)
    # Renamed last: the name says that the file is whole.
    return part.rename(out)


def figures_of(text: str) -> dict[str, float]:
    """Tokens per second in the output of `llama-bench -o json`, named as ours."""
    figures: dict[str, float] = {}
    for test in json.loads(text):
        prompt_tokens, made = test["n_prompt"], test["n_gen"]
        name = f"prefill_{prompt_tokens}" if prompt_tokens else f"decode_{test['n_depth']}"
        figures[name] = (prompt_tokens or made) * 1e9 / test["avg_ns"]
    return figures


def _listed(numbers: tuple[int, ...]) -> str:
    return ",".join(map(str, numbers))


@dataclass(frozen=True)
class LlamaBench:
    """Runs of `llama-bench` on one file."""

    sources: Path
    file: Path

    def _run(self, log: Path, *arguments: str) -> process.Finished:
        binary = self.sources / "build" / "bin" / "llama-bench"
        threads = str(len(os.sched_getaffinity(0)))
        fixed = ("-t", threads, "-r", "1", "-o", "json")
        return process.run([binary, "-m", self.file, *fixed, *arguments], log=log)

    def measure(self, plan: Plan, log: Path) -> dict[str, float]:
        """The figures of one round; each rate is of one run behind a run to warm up.

        Raises:
            process.ProcessError: a run fails.
        """
        # It reports no load, so that is what a process of one short prompt takes beside the prompt.
        first = self._run(log, "--no-warmup", "-p", str(FIRST), "-n", "0")
        took = FIRST / figures_of(first.output)[f"prefill_{FIRST}"]
        figures = {
            "load_seconds": first.seconds - took,
            "first_token_seconds": took,
            "load_to_first_seconds": first.seconds,
            "start_to_first_seconds": first.seconds,
        }
        runs = [first]
        if plan.prefills:
            runs.append(self._run(log, "-n", "0", "-p", _listed(plan.prefills)))
        if plan.depths:
            steps = str(plan.tokens)
            runs.append(self._run(log, "-p", "0", "-n", steps, "-d", _listed(plan.depths)))
        for run in runs[1:]:
            figures |= figures_of(run.output)
        fullest = max(runs, key=lambda run: run.peak_gib)
        return {
            **figures,
            "peak_gib": fullest.peak_gib,
            "anonymous_gib": fullest.anonymous_gib,
        }
