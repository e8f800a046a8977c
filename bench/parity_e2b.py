"""Exact mode at E2B's full size: every logit against transformers, in prefill and in decode.

    python -m bench.parity_e2b [CHECKPOINT]

Prefill of 40, 508 and 560 tokens and 12 steps from 40 and 508, which cross the window of 512. Ends
with status 1 unless all bits are equal.
"""

import sys
import time
from pathlib import Path

import torch

import torchtpu_rs
from bench import e2b_shape
from bench.e2b_shape import prompt
from bench.exact import equal_bits, load_transformers, run_transformers

PREFILLS = (40, 508, 560)
DECODES = {40: 12, 508: 12}


def main() -> int:
    """Returns the process's exit status."""
    folder = e2b_shape.make(Path(sys.argv[1]) if len(sys.argv) > 1 else e2b_shape.scratch())
    model = load_transformers(folder)
    engine = torchtpu_rs.Engine(folder, torch.zeros(1), 1024)
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads, {folder.name}")
    failed = False
    for tokens in PREFILLS:
        begun = time.perf_counter()
        steps = DECODES.get(tokens, 1)
        ids = prompt(tokens)
        reference = run_transformers(model, ids, steps)
        differences = {
            f"prefill of {tokens} tokens": equal_bits(
                engine.logits(ids, all=True), reference.prompt
            ),
            f"{steps} steps from {tokens}": equal_bits(
                engine.logits(ids, reference.new_ids[:-1]), reference.steps
            ),
        }
        for what, difference in differences.items():
            print(f"{what}: {difference or '100 % equal bits'}", flush=True)
            failed |= difference is not None
        print(f"  ({time.perf_counter() - begun:.0f} s)", flush=True)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
