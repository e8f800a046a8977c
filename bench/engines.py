"""This project's engine and transformers, as `bench.measures` wants them: `python -m bench.engines SIDE < job`."""

import sys
import time
from collections.abc import Callable
from typing import Any, Literal

import torch

import torchtpu_rs
from bench.measures import Engine, Job, main


class Ours:
    """torchtpu_rs; the time of decoding is by its own clock."""

    def __init__(self, job: Job, arithmetic: Literal["exact", "fast"]) -> None:
        self.engine = torchtpu_rs.Engine(
            job.checkpoint, torch.zeros(1), job.context, arithmetic=arithmetic
        )

    def prefill(self, ids: list[int]) -> None:
        """One token of an answer."""
        self.engine.decode(ids, 1, stop=[])

    def decode_seconds(self, ids: list[int], tokens: int) -> float:
        """From the first token of an answer to its last."""
        return self.engine.decode(ids, tokens + 1, stop=[]).decode_seconds


class Transformers:
    """transformers with its defaults; a decode step is one forward and the choice, without `generate`'s loop."""

    def __init__(self, model: Any) -> None:
        self.model = model
        self.model.eval()

    def _first(self, ids: list[int]) -> Any:
        out = self.model(torch.tensor([ids]), logits_to_keep=1, use_cache=True)
        out.logits[0, -1].float().argmax().item()
        return out

    @torch.inference_mode()
    def prefill(self, ids: list[int]) -> None:
        """One forward and the choice."""
        self._first(ids)

    @torch.inference_mode()
    def decode_seconds(self, ids: list[int], tokens: int) -> float:
        """From the end of the prefill to the last token's arrival."""
        out = self._first(ids)
        begun = time.perf_counter()
        for _ in range(tokens):
            token = out.logits[0, -1].float().argmax()
            out = self.model(token.view(1, 1), past_key_values=out.past_key_values, use_cache=True)
            token.item()
        return time.perf_counter() - begun


def ours(arithmetic: Literal["exact", "fast"]) -> Callable[[Job], Engine]:
    """What loads torchtpu_rs."""
    return lambda job: Ours(job, arithmetic)


def transformers() -> Callable[[Job], Engine]:
    """What loads transformers; its import, of seconds, is no part of the load."""
    from transformers import AutoModelForCausalLM

    def load(job: Job) -> Engine:
        return Transformers(
            AutoModelForCausalLM.from_pretrained(job.checkpoint, dtype=torch.bfloat16)
        )

    return load


LOADERS: dict[str, Callable[[], Callable[[Job], Engine]]] = {
    "exact": lambda: ours("exact"),
    "fast": lambda: ours("fast"),
    "transformers": transformers,
}

if __name__ == "__main__":
    main(LOADERS[sys.argv[1]]())
