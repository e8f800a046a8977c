"""mistral.rs, as `bench.measures` wants it: run in its environment, `python -m bench.cpu.mistralrs_engine FORM TOKENIZER < job`.

It takes prompts as text. TOKENIZER is a tokenizer.json in which every id is a word, so that a prompt has exactly the ids that are asked
for: `bench.cpu.mistralrs_shape` and `bench.real.mistralrs` write one. Held to one core of
two by taskset it took four times as long as with RAYON_NUM_THREADS=1 besides: it counts the machine's cores.
"""

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from mistralrs import CompletionRequest, ModelDType, MultimodalArchitecture, Runner, Which

from bench.measures import Job, main

Loader = Callable[[Path, Path], Any]
"""From a checkpoint and a tokenizer to mistral.rs's `Runner`."""


def _run(which: Any, quantized: str | None = None) -> Any:
    return Runner(which, max_seqs=1, prefix_cache_n=0, token_source="none", in_situ_quant=quantized)


def _folder(architecture: Any, dtype: Any, quantized: str | None = None) -> Loader:
    def load(checkpoint: Path, tokenizer: Path) -> Any:
        which = Which.MultimodalPlain(
            model_id=str(checkpoint),
            arch=architecture,
            tokenizer_json=str(tokenizer),
            dtype=dtype,
        )
        return _run(which, quantized)

    return load


def _file(checkpoint: Path, tokenizer: Path) -> Any:
    return _run(
        Which.GGUF(
            quantized_model_id=str(checkpoint.parent),
            quantized_filename=checkpoint.name,
            tokenizer_json=str(tokenizer),
        )
    )


# Version 0.9.5. Gemma 3 too goes through the loader of text and images: that of text says "Unsupported Hugging Face Transformers
# -CausalLM model class `Gemma3ForCausalLM`". Its own choice of type on a CPU is float32, and so it is in a GGUF file.
LOADERS = {
    # bfloat16 makes one token of E2B in four seconds: the four bits in which it is fastest.
    "gemma4_q4k": _folder(MultimodalArchitecture.Gemma4, ModelDType.BF16, "q4k"),
    "gemma3_bf16": _folder(MultimodalArchitecture.Gemma3, ModelDType.BF16),
    "gemma3_f32": _folder(MultimodalArchitecture.Gemma3, ModelDType.F32),
    "gemma3_q4k": _folder(MultimodalArchitecture.Gemma3, ModelDType.BF16, "q4k"),
    "gguf": _file,
}
"""What loads a checkpoint, by its form."""


class MistralRs:
    """One request at a time; the time of decoding is by its own clock, of milliseconds."""

    def __init__(self, checkpoint: str, form: str, tokenizer: str) -> None:
        # With a backtrace behind its errors their last line, which `bench.process` reports, would say nothing.
        os.environ["RUST_LIB_BACKTRACE"] = "0"
        made = json.loads(Path(tokenizer).read_text())
        self.words = {token_id: word for word, token_id in made["model"]["vocab"].items()}
        split = made["pre_tokenizer"]
        self.between = split["pattern"]["String"] if split["type"] == "Split" else " "
        self.runner = LOADERS[form](Path(checkpoint), Path(tokenizer))

    def answer(self, ids: list[int], tokens: int) -> Any:
        """The response to a prompt of `ids`: so many of the likeliest tokens, whatever they are.

        Raises:
            ValueError: it read or made another number of tokens.
        """
        request = CompletionRequest(
            prompt=self.between.join(self.words[token_id] for token_id in ids),
            model="default",
            max_tokens=tokens,
            temperature=0.0,
            ignore_eos=True,
        )
        response = self.runner.send_completion_request(request)
        found = (response.usage.prompt_tokens, response.usage.completion_tokens)
        if found != (len(ids), tokens):
            raise ValueError(f"expected {len(ids)} tokens and {tokens} more, found {found}")
        return response

    def prefill(self, ids: list[int]) -> None:
        """One token of an answer."""
        self.answer(ids, 1)

    def decode_seconds(self, ids: list[int], tokens: int) -> float:
        """From the first token of an answer to its last."""
        took: float = self.answer(ids, tokens + 1).usage.total_completion_time_sec
        return took


def load(job: Job) -> MistralRs:
    """The engine that the command line names."""
    return MistralRs(job.checkpoint, *sys.argv[1:])


if __name__ == "__main__":
    main(load)
