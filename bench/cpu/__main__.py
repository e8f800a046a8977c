"""Runs every side in turn, prints the table, writes the results and the plot.

    python -m bench.cpu [--rounds 3] [--peers llama_q4_0 …] [--only decode …] [--out bench/results/cpu.json]
    python -m bench.cpu --profile      # where a token's time goes, ours part by part

Peers are installed and checkpoints made below $TORCHTPU_SCRATCH first, once: 50 GB and a quarter of an hour. Each
measurement is a process of its own with the files it reads in the page cache; the order changes from round to
round, and memory's read bandwidth is measured before and after each.
"""

import argparse
import json
import platform
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

import torchtpu_rs
from bench.compare import read_bandwidth
from bench.cpu import install, profile
from bench.cpu.plan import Plan
from bench.cpu.plot import draw
from bench.cpu.sides import SIDES, Ready
from bench.cpu.table import table
from bench.process import ProcessError

LABELS = {name: side.label for name, side in SIDES.items()}
OURS = [name for name in SIDES if name.startswith("ours")]
PEERS = [name for name in SIDES if name not in OURS]
CHUNK = 1 << 24


def prepare(names: Sequence[str]) -> tuple[dict[str, Ready], dict[str, str]]:
    """The sides that can run, and why the others cannot."""
    ready: dict[str, Ready] = {}
    not_run: dict[str, str] = {}
    for name in names:
        print(f"preparing {name}", flush=True)
        try:
            ready[name] = SIDES[name].prepare()
        except ProcessError as error:
            not_run[name] = str(error)
            print(f"not run: {name}: {error}", flush=True)
    return ready, not_run


def warm(files: Sequence[Path]) -> None:
    """Reads files once, so that they are in the page cache."""
    buffer = bytearray(CHUNK)
    for file in files:
        with file.open("rb", buffering=0) as opened:
            while opened.readinto(buffer):
                pass


def run_once(ready: Ready, plan: Plan, log: Path) -> dict[str, float]:
    """The figures of one process, with the bandwidth before and after it."""
    warm(ready.files)
    before = read_bandwidth()
    figures = ready.measure(plan, log)
    after = read_bandwidth()
    beside = {"before_gbs": before, "after_gbs": after, "bandwidth_gbs": (before + after) / 2}
    return {**beside, **figures}


def run_all(
    ready: dict[str, Ready], not_run: dict[str, str], rounds: int, plan: Plan
) -> Iterator[dict[str, Any]]:
    """All rounds. A side that fails is left out of those that follow, and its reason put into `not_run`."""
    logs = install.peers().parent / "logs"
    logs.mkdir(parents=True, exist_ok=True)
    for number in range(rounds):
        # The order changes, so that a drift of the machine favours none.
        for name in list(ready)[:: 1 if number % 2 == 0 else -1]:
            if name in not_run:
                continue
            try:
                run = run_once(ready[name], plan, logs / f"{name}.log")
            except ProcessError as error:
                not_run[name] = f"in round {number}: {error}"
                print(f"round {number} {name}: not run: {error}", flush=True)
                continue
            rounded = {key: round(value, 3) for key, value in run.items()}
            print(f"round {number} {name}: {json.dumps(rounded)}", flush=True)
            yield {"round": number, "side": name, **run}


def main() -> None:
    """Reads the command line, measures, prints, writes."""
    parser = argparse.ArgumentParser(
        "python -m bench.cpu", description="Compare speed on a CPU with other engines."
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--ours", nargs="*", choices=OURS, default=OURS)
    parser.add_argument("--peers", nargs="*", choices=PEERS, default=PEERS)
    parser.add_argument("--only", nargs="+", choices=("decode", "prefill", "load"))
    parser.add_argument("--out", type=Path, default=Path("bench/results/cpu.json"))
    parser.add_argument(
        "--profile", action="store_true", help="only where a token's time goes, ours part by part"
    )
    arguments = parser.parse_args()
    if arguments.profile:
        profile.show_all()
        return
    plan = Plan()
    if arguments.only:
        plan = Plan(
            prefills=plan.prefills if "prefill" in arguments.only else (),
            depths=plan.depths if "decode" in arguments.only else (),
        )
    ready, not_run = prepare([*arguments.ours, *arguments.peers])
    machine = {
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "machine": platform.machine(),
        "build": torchtpu_rs.BUILD,
        "peers": [install.LLAMA, install.VLLM, install.MISTRALRS],
    }
    runs: list[dict[str, Any]] = []
    results = {"machine": machine, "labels": LABELS, "not_run": not_run, "runs": runs}
    arguments.out.parent.mkdir(parents=True, exist_ok=True)

    def write() -> None:
        arguments.out.write_text(json.dumps(results, indent=1) + "\n")

    for run in run_all(ready, not_run, arguments.rounds, plan):
        runs.append(run)
        # After each, so that an hour's runs outlive whatever ends the next.
        write()
    write()
    if runs:
        draw(runs, LABELS, arguments.out.with_suffix(".svg"))
    print(table(runs, LABELS, not_run))


if __name__ == "__main__":
    main()
