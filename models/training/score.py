"""Scores a checkpoint folder on held-out chats: `python -m models.training.score FOLDER`.

Every question's phrasing, names and numbers are on the side of the split that training never draws from. An answer is right
if greedy decoding gives its text to the last character, the stop token included. Exit status 1: the whole is under the
bar, or a category under the floor.
"""

import argparse
import importlib
import random
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from transformers import Gemma4ForCausalLM

from models.training.chats import Chat
from models.training.corpus import make_chat
from models.training.mixes import SCORED
from models.training.tokenizer import PAD, STOP_IDS, Renderer

BAR = 0.95
FLOOR = 0.85
SEED = 90_001
MAX_NEW = 140
LONGEST_PROMPT = 600
ROWS = 24

Answer = Callable[[list[list[int]]], list[list[int]]]
"""Takes prompts and returns for each the greedy answer's ids, the stop id included."""

CATEGORIES = (
    "greeting", "small talk", "topic", "one or two sentences", "addition", "comparison", "counting", "echo", "memory",
    "memory past the window", "after long text", "tool call", "tool answer", "tools not needed", "no tool", "unknown", "thinking",
)  # fmt: skip


def held_out_chats(count: int, seed: int = SEED) -> list[Chat]:
    """Returns `count` held-out chats of every category."""
    rng = random.Random(seed)
    found: Counter[str] = Counter()
    chats: list[Chat] = []
    while len(chats) < count * len(CATEGORIES):
        chat = make_chat(rng, score=True, mix=SCORED)
        if found[chat.category] < count:
            found[chat.category] += 1
            chats.append(chat)
    return chats


def transformers_answers(folder: Path) -> Answer:
    """Returns greedy decoding by transformers, in the dtype the checkpoint is stored in."""
    model: Any = Gemma4ForCausalLM.from_pretrained(folder, dtype="auto")

    def answer(prompts: list[list[int]]) -> list[list[int]]:
        length = max(map(len, prompts))
        ids = torch.tensor([[PAD] * (length - len(p)) + p for p in prompts])
        mask = torch.tensor([[0] * (length - len(p)) + [1] * len(p) for p in prompts])
        with torch.inference_mode():
            out = model.generate(ids, attention_mask=mask, max_new_tokens=MAX_NEW, do_sample=False)
        return [until_stop(row[length:].tolist()) for row in out]

    return answer


def torchtpu_rs_answers(folder: Path) -> Answer:
    """Returns greedy decoding by this project's own engine."""
    engine = importlib.import_module("torchtpu_rs").Engine(str(folder), torch.zeros(1))

    def answer(prompts: list[list[int]]) -> list[list[int]]:
        answers = []
        for prompt in prompts:
            result = engine.decode(prompt, MAX_NEW, stop=None)
            stopped = [] if result.stop_id is None else [result.stop_id]
            answers.append([*result.ids, *stopped])
        return answers

    return answer


BACKENDS = {"transformers": transformers_answers, "torchtpu_rs": torchtpu_rs_answers}


def until_stop(ids: list[int]) -> list[int]:
    """Cuts ids after the first stop id."""
    for i, token in enumerate(ids):
        if token in STOP_IDS:
            return ids[: i + 1]
    return ids


def score(folder: Path, backend: str, count: int, show: int) -> dict[str, tuple[int, int]]:
    """Returns for each category how many answers were right, and of how many; prints the first `show` wrong ones."""
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    renderer = Renderer(tokenizer)
    cases = [(chat.category, *renderer.judged(chat)) for chat in held_out_chats(count)]
    cases = sorted((c for c in cases if len(c[1]) <= LONGEST_PROMPT), key=lambda c: len(c[1]))
    answer = BACKENDS[backend](folder)
    asked: Counter[str] = Counter()
    right: Counter[str] = Counter()
    shown: Counter[str] = Counter()
    for at in range(0, len(cases), ROWS):
        rows = cases[at : at + ROWS]
        given = answer([prompt for _, prompt, _ in rows])
        for (category, prompt, wanted), got in zip(rows, given, strict=True):
            tail, want, have = (
                tokenizer.decode(x, skip_special_tokens=False) for x in (prompt[-60:], wanted, got)
            )
            asked[category] += 1
            right[category] += want == have
            if want != have and shown[category] < show:
                shown[category] += 1
                print(f"[{category}] ...{tail!r}\n    wanted {want!r}\n    got    {have!r}")
    return {c: (right[c], asked[c]) for c in CATEGORIES}


def table(results: dict[str, tuple[int, int]]) -> str:
    """Returns the results as a Markdown table, the whole in its last row."""
    rows = list(results.items())
    rows.append(("all", (sum(r for r, _ in results.values()), sum(n for _, n in results.values()))))
    lines = ["| category | right | asked | share |", "|---|---|---|---|"]
    lines += [f"| {name} | {r} | {n} | {100 * r / max(n, 1):.1f} % |" for name, (r, n) in rows]
    return "\n".join(lines)


def main() -> None:
    """Reads the command line, prints the table and exits with 1 if the whole or a category is too low."""
    parser = argparse.ArgumentParser(description="Score a checkpoint on held-out chats.")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--backend", choices=sorted(BACKENDS), default="transformers")
    parser.add_argument("--count", type=int, default=100, help="chats of each category")
    parser.add_argument(
        "--show", type=int, default=0, help="wrong answers to print for each category"
    )
    arguments = parser.parse_args()
    results = score(arguments.folder, arguments.backend, arguments.count, arguments.show)
    print(table(results))
    right, asked = (sum(column) for column in zip(*results.values(), strict=True))
    low = any(right < FLOOR * asked for right, asked in results.values())
    sys.exit(right < BAR * asked or low)


if __name__ == "__main__":
    main()
