"""What the arithmetic of compiled programs changes, by teacher forcing: `python -m bench.quality [CHECKPOINT]`.

Every token of some texts is predicted from the true ones before it, in exact mode and with the operations of compiled
programs, bfloat16 and int8, run one by one on the CPU. Beside them stands transformers' own noise: exact mode reading the
same tokens one at a time instead of all at once. Both are transformers' bits, and they differ.

Texts: the embedded model's held-out chats; for other checkpoints (default: one of E2B's shape with random weights)
random ids.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Literal, NamedTuple

import torch

import torchtpu_rs
from bench import e2b_shape
from models import EMBEDDED

CHUNK = 64


class Judged(NamedTuple):
    """Of each predicted token."""

    divergence: torch.Tensor
    """KL(exact || other), nats."""
    agrees: torch.Tensor
    """Whether the likeliest id is the same."""
    margin: torch.Tensor
    """Exact mode's logit of its likeliest id less its second's."""


def texts_of(folder: Path, count: int, tokens: int) -> list[list[int]]:
    """Token ids to read, a list a text."""
    if folder.resolve() != EMBEDDED.resolve():
        return [e2b_shape.prompt(tokens + i) for i in range(count)]
    from tokenizers import Tokenizer

    from models.training.score import held_out_chats
    from models.training.tokenizer import Renderer

    renderer = Renderer(Tokenizer.from_file(str(EMBEDDED / "tokenizer.json")))
    chats = [renderer.judged(chat) for chat in held_out_chats(count)]
    return [[*prompt, *answer] for prompt, answer in chats[:count]]


def judge(exact: torch.Tensor, other: torch.Tensor) -> Judged:
    """`exact` and `other`: logits `[tokens, vocab]` of the same text."""
    log_p, log_q = exact.double().log_softmax(-1), other.double().log_softmax(-1)
    best = exact.float().topk(2).values
    return Judged(
        (log_p.exp() * (log_p - log_q)).sum(-1),
        # Not by `topk`, which may name another of several equal ones.
        exact.argmax(-1) == other.argmax(-1),
        best[:, 0] - best[:, 1],
    )


def judge_all(wanted: list[torch.Tensor], found: list[torch.Tensor]) -> Judged:
    """`judge` of every text, in one."""
    parts = [judge(*pair) for pair in zip(wanted, found, strict=True)]
    return Judged(*(torch.cat(column) for column in zip(*parts, strict=True)))


def report(name: str, judged: Judged) -> dict[str, object]:
    """One line about all texts."""
    divergence, agrees, margin = judged
    parted = margin[~agrees]
    return {
        "compared": name,
        "tokens": len(agrees),
        "mean_kl": float(f"{divergence.mean().item():.3g}"),
        "p99_kl": float(f"{divergence.quantile(0.99).item():.3g}"),
        "top1_agreement": round(agrees.double().mean().item(), 5),
        "largest_margin_where_top1_differs": round(parted.max().item(), 4) if len(parted) else None,
    }


def main() -> None:
    """Reads the command line, prints one JSON line for each comparison with exact mode."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("checkpoint", type=Path, nargs="?")
    parser.add_argument("--texts", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=128, help="of a random text")
    arguments = parser.parse_args()
    folder = arguments.checkpoint or e2b_shape.make(e2b_shape.scratch())
    texts = texts_of(folder, arguments.texts, arguments.tokens)
    context = max(map(len, texts))

    def engine(arithmetic: Literal["exact", "fast", "compiled", "int8"]) -> torchtpu_rs.Engine:
        chunk = CHUNK if arithmetic in ("compiled", "int8") else None
        return torchtpu_rs.Engine(
            folder, torch.zeros(1), context, prefill_chunk=chunk, arithmetic=arithmetic
        )

    exact = engine("exact")
    wanted = [exact.logits(ids, all=True) for ids in texts]

    def show(name: str, found: list[torch.Tensor]) -> None:
        sys.stdout.write(json.dumps(report(name, judge_all(wanted, found))) + "\n")
        sys.stdout.flush()

    show("exact, token by token", [exact.logits(ids[:1], ids[1:]) for ids in texts])
    del exact
    for arithmetic in ("fast", "compiled", "int8"):
        other = engine(arithmetic)
        show(arithmetic, [other.logits(ids, all=True) for ids in texts])
        del other


if __name__ == "__main__":
    main()
