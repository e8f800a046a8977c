"""Where a token's time goes, part by part: `python -m bench.cpu --profile`, or `python -m bench.cpu.profile [CHECKPOINT] [--depth N]`.

Milliseconds of each part of a decode step by the engine's own clock, the bytes of weights that the part reads, and both
divided; beside them the bandwidth that memory had before and after, at which the bytes of all parts are the floor.
"""

import argparse
from pathlib import Path

import torch

import torchtpu_rs
from bench.compare import read_bandwidth
from bench.cpu.sides import checkpoint
from bench.e2b_shape import prompt

TOKENS = 32
FORMS = ("w4a16", "w4a16-bf16-tables", "bf16")
Part = tuple[str, float, int]


def profile(folder: Path, depth: int) -> list[Part]:
    """Name, seconds and bytes of each part, of one token behind `depth` others."""
    engine = torchtpu_rs.Engine(folder, torch.zeros(1), depth + TOKENS + 1, arithmetic="fast")
    engine.decode(prompt(depth), TOKENS // 4, stop=[])
    engine.decode(prompt(depth), TOKENS + 1, stop=[])
    return [(name, took / TOKENS, size // TOKENS) for name, took, size in engine.parts()]


def table(parts: list[Part], bandwidth: float) -> str:
    """The parts as Markdown, with their sum and the floor at `bandwidth` GB/s."""
    lines = ["| part | ms a token | MB | GB/s |", "|---|---|---|---|"]
    seconds, total = sum(part[1] for part in parts), sum(part[2] for part in parts)
    for name, took, size in [*parts, ("all", seconds, total)]:
        speed = f"{size / took / 1e9:.1f}" if size else "-"
        lines.append(f"| {name} | {took * 1e3:.2f} | {size / 1e6:.1f} | {speed} |")
    floor = total / bandwidth / 1e9
    lines.append(
        f"\nMemory was read at {bandwidth:.0f} GB/s beside it: the floor is {floor * 1e3:.1f} ms, {floor / seconds:.0%} of what "
        f"a token takes ({1 / seconds:.1f} tokens/s)."
    )
    return "\n".join(lines)


def show(folder: Path, depth: int) -> None:
    """Measures and prints."""
    before = read_bandwidth()
    parts = profile(folder, depth)
    print(f"{folder.name}, behind {depth} tokens\n")
    print(table(parts, (before + read_bandwidth()) / 2), flush=True)


def show_all() -> None:
    """Every form of weights at E2B's size, behind 64 and 4096 tokens."""
    for form in FORMS:
        for depth in (64, 4096):
            show(checkpoint(form), depth)
            print()


def main() -> None:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description="Where a token's time goes.")
    parser.add_argument("checkpoint", type=Path, nargs="?")
    parser.add_argument("--depth", type=int, default=64)
    arguments = parser.parse_args()
    if arguments.checkpoint:
        show(arguments.checkpoint, arguments.depth)
    else:
        show_all()


if __name__ == "__main__":
    main()
