"""What `bench.cpu` compares: each side's checkpoint, how it is made, and the processes that measure it.

A side is prepared once, outside every measurement; a side that cannot be prepared or run says why.
"""

import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from bench import e2b_shape, process
from bench.cpu import install, llama
from bench.cpu.plan import Plan


@dataclass(frozen=True)
class Ready:
    """A prepared side: the files it reads, and one run of it."""

    files: list[Path]
    measure: Callable[[Plan, Path], dict[str, float]]
    """Figures of a run whose messages go to the file given."""


@dataclass(frozen=True)
class Side:
    """One engine with one form of weights."""

    label: str
    prepare: Callable[[], Ready]


def checkpoint(form: str) -> Path:
    """The checkpoint of E2B's shape in `form`, made if it is not there."""
    folder = e2b_shape.scratch(form)
    packed = form.startswith("w4a16")
    return e2b_shape.make(folder, w4a16=packed, tables="bf16-tables" not in form)


def of_python(checkpoint: Path, command: list[str | Path]) -> Ready:
    """A process of `bench.measures` on a folder of safetensors, or on one file."""

    def measure(plan: Plan, log: Path) -> dict[str, float]:
        return process.run_job(command, plan.job(checkpoint), log=log)

    files = [checkpoint] if checkpoint.is_file() else sorted(checkpoint.glob("*.safetensors"))
    return Ready(files, measure)


def _here(form: str, engine: str) -> Callable[[], Ready]:
    return lambda: of_python(checkpoint(form), [sys.executable, "-m", "bench.engines", engine])


def _vllm() -> Ready:
    python = install.environment("vllm", install.VLLM, overrides=install.VLLM_OVERRIDES)
    return of_python(checkpoint("bf16"), [python, "-m", "bench.cpu.vllm_engine"])


def _mistralrs() -> Ready:
    from bench.cpu import mistralrs_shape

    python = install.environment("mistralrs", install.MISTRALRS)
    dressed = mistralrs_shape.make(checkpoint("bf16"), e2b_shape.scratch("mistralrs"))
    tokenizer = dressed / "tokenizer.json"
    return of_python(dressed, [python, "-m", "bench.cpu.mistralrs_engine", "gemma4_q4k", tokenizer])


def _llama(form: str, *options: str) -> Callable[[], Ready]:
    def prepare() -> Ready:
        sources = install.llama()
        file = llama.gguf(sources, checkpoint("bf16"), form, *options)
        return Ready([file], llama.LlamaBench(sources, file).measure)

    return prepare


SIDES = {
    "ours_w4a16": Side("torchtpu_rs, W4A16", _here("w4a16", "fast")),
    "ours_w4a16_bf16_head": Side(
        "torchtpu_rs, W4A16, bf16 head and tables", _here("w4a16-bf16-tables", "fast")
    ),
    "ours_bf16": Side("torchtpu_rs, bf16", _here("bf16", "fast")),
    "llama_q4_0": Side("llama.cpp, Q4_0, Q6_K head and tables", _llama("q4_0")),
    "llama_q4_0_pure": Side("llama.cpp, all Q4_0", _llama("q4_0-pure", "--pure")),
    "llama_bf16": Side("llama.cpp, BF16", _llama("bf16")),
    "transformers_bf16": Side("transformers, bf16", _here("bf16", "transformers")),
    "vllm_bf16": Side("vLLM, bf16, fast prefill", _vllm),
    "mistralrs_q4k": Side("mistral.rs, Q4K made at load", _mistralrs),
}
"""By their names on the command line and in results."""
