"""vLLM's CPU build, as `bench.measures` wants it: run in vLLM's environment, `python -m bench.cpu.vllm_engine < job`.

At its best without minutes of compilation: eager, in this process, a prompt whole, and only the last token through
the layers that share keys and values (`kv_sharing_fast_prefill`, off by default).
"""

import os

# Read when vllm is imported. Without the second it leaves a core to its own front end, which has no work here.
os.environ |= {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, sorted(os.sched_getaffinity(0)))),
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
}

from typing import Any

from vllm import LLM, SamplingParams

from bench.measures import Job, main


class Vllm:
    """One request at a time; the time of decoding is by its own clock."""

    def __init__(self, job: Job) -> None:
        self.model: Any = LLM(
            job.checkpoint,
            dtype="bfloat16",
            skip_tokenizer_init=True,
            enforce_eager=True,
            max_model_len=job.context,
            max_num_seqs=1,
            max_num_batched_tokens=job.context,
            enable_prefix_caching=False,
            kv_sharing_fast_prefill=True,
            disable_log_stats=False,
        )

    def _answer(self, ids: list[int], tokens: int) -> Any:
        sampling = SamplingParams(
            temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False
        )
        (answer,) = self.model.generate({"prompt_token_ids": ids}, sampling, use_tqdm=False)
        return answer

    def prefill(self, ids: list[int]) -> None:
        """One token of an answer."""
        self._answer(ids, 1)

    def decode_seconds(self, ids: list[int], tokens: int) -> float:
        """From the first token of an answer to its last."""
        times = self._answer(ids, tokens + 1).metrics
        took: float = times.last_token_ts - times.first_token_ts
        return took


if __name__ == "__main__":
    main(Vllm)
