"""Ours and transformers on one prompt, one process a side.

    python -m bench.parity CHECKPOINT [--tokens 64] [--prompt TEXT]

Prints the five likeliest first tokens of both, the KL divergence of the first distribution, how many of
the greedy tokens are equal, and the first difference with transformers' own margin there. Ends with
status 1 when a token differs.
"""

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

import torchtpu_rs
from bench.exact import load_transformers, run_transformers
from server.chat import ChatTemplate
from server.tokenizer import Tokenizer

PROMPT = "Write a short paragraph about the ocean."


def prompt_ids(folder: Path, text: str) -> list[int]:
    """The chat prompt's ids; a checkpoint without a tokenizer gets seeded random ids."""
    if not (folder / "tokenizer.json").is_file():
        return [
            2,
            *torch.randint(107, 500, (31,), generator=torch.Generator().manual_seed(7)).tolist(),
        ]
    tokenizer = Tokenizer.from_folder(folder)
    template = ChatTemplate.from_folder(folder, tokenizer)
    if template is None:
        return [2, *tokenizer.encode_text(text)]
    return template.render([{"role": "user", "content": text}]).token_ids


def run_side(side: str, folder: Path, ids: list[int], tokens: int) -> dict[str, Any]:
    """First logits and greedy ids; transformers also gives the margin of each of its choices."""
    if side == "rust":
        engine = torchtpu_rs.Engine(folder, torch.zeros(1))
        first = engine.logits(ids)[0].float()
        return {"first": first, "ids": engine.decode(ids, tokens, stop=[]).ids, "margins": []}
    reference = run_transformers(load_transformers(folder), ids, tokens, whole_prompt=False)
    best = reference.steps.float().topk(2).values
    margins = (best[:, 0] - best[:, 1]).tolist()
    return {"first": reference.steps[0].float(), "ids": reference.new_ids, "margins": margins}


def report(rust: dict[str, Any], other: dict[str, Any]) -> int:
    """Prints the comparison; returns the number of tokens that differ."""
    top = [side["first"].topk(5).indices.tolist() for side in (rust, other)]
    log_p, log_q = (side["first"].double().log_softmax(-1) for side in (other, rust))
    kl = (log_p.exp() * (log_p - log_q)).sum().item()
    found: list[int] = rust["ids"]
    expected: list[int] = other["ids"]
    pairs = list(zip(found, expected, strict=False))
    same = sum(ours == theirs for ours, theirs in pairs)
    first = next((i for i, (ours, theirs) in enumerate(pairs) if ours != theirs), None)
    print(f"top5 rust {top[0]} hf {top[1]}")
    print(f"KL(hf||rs) {kl:.3e}; same {same} of {len(other['ids'])}; first diff {first}")
    if first is not None:
        ours, theirs = pairs[first]
        print(f"  at {first}: rust {ours}, hf {theirs}, hf's margin {other['margins'][first]:.4f}")
    return len(expected) - same


def main() -> int:
    """Returns the process's exit status."""
    parser = argparse.ArgumentParser(description="Compare with transformers, token by token.")
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--prompt", default=PROMPT)
    parser.add_argument("--side", choices=["rust", "hf"], help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.side:
        ids = prompt_ids(arguments.checkpoint, arguments.prompt)
        result = run_side(arguments.side, arguments.checkpoint, ids, arguments.tokens)
        torch.save(result, arguments.out)
        return 0
    sides = {}
    with tempfile.TemporaryDirectory() as folder:
        for side in ("rust", "hf"):
            out = Path(folder) / side
            command = [sys.executable, "-m", "bench.parity", *sys.argv[1:], "--side", side]
            subprocess.run([*command, "--out", str(out)], check=True)
            sides[side] = torch.load(out)
    return int(report(sides["rust"], sides["hf"]) > 0)


if __name__ == "__main__":
    sys.exit(main())
