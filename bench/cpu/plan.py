"""What `bench.cpu` measures of every side: lengths of prompts and how deep decoding begins. Knows no engine."""

from dataclasses import dataclass
from pathlib import Path

from bench.e2b_shape import prompt
from bench.measures import Job

FIRST = 64
"""Tokens of the prompt whose answer's first token ends the start."""


@dataclass(frozen=True)
class Plan:
    """Prefills of so many tokens, and `tokens` steps of decoding behind so many."""

    prefills: tuple[int, ...] = (64, 512, 2048)
    depths: tuple[int, ...] = (0, 512, 4096)
    tokens: int = 24

    def job(self, checkpoint: Path) -> Job:
        """The same for a process of `bench.measures`. Depth 0 is a prompt of BOS alone."""
        return Job(
            checkpoint=str(checkpoint),
            first=prompt(FIRST),
            prefill={f"prefill_{tokens}": prompt(tokens) for tokens in self.prefills},
            decode={f"decode_{depth}": prompt(max(depth, 1)) for depth in self.depths},
            decode_tokens=self.tokens,
            context=max([FIRST, *self.prefills, *self.depths]) + self.tokens + 1,
        )
