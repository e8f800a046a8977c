"""mistral.rs, as `bench.measures` wants it: run in its environment, `python -m bench.cpu.mistralrs_engine < job`.

The checkpoint is the folder that `bench.cpu.mistralrs_shape` writes. In bfloat16 version 0.9.5 makes one token in
four seconds on a CPU, so it is measured with the four-bit weights in which it is fastest, Q4K, made at load.
"""

from typing import Any

from mistralrs import CompletionRequest, ModelDType, MultimodalArchitecture, Runner, Which

from bench.measures import Job, main


class MistralRs:
    """One request at a time; the time of decoding is by its own clock, of milliseconds."""

    def __init__(self, job: Job) -> None:
        which = Which.MultimodalPlain(
            model_id=job.checkpoint,
            arch=MultimodalArchitecture.Gemma4,
            dtype=ModelDType.BF16,
        )
        self.runner: Any = Runner(
            which, max_seqs=1, prefix_cache_n=0, token_source="none", in_situ_quant="q4k"
        )

    def _answer(self, ids: list[int], tokens: int) -> Any:
        request = CompletionRequest(
            prompt=" ".join(map(str, ids)),
            model="default",
            max_tokens=tokens,
            temperature=0.0,
            ignore_eos=True,
        )
        usage = self.runner.send_completion_request(request).usage
        found = (usage.prompt_tokens, usage.completion_tokens)
        if found != (len(ids), tokens):
            raise ValueError(f"expected {len(ids)} tokens and {tokens} more, found {found}")
        return usage

    def prefill(self, ids: list[int]) -> None:
        """One token of an answer."""
        self._answer(ids, 1)

    def decode_seconds(self, ids: list[int], tokens: int) -> float:
        """From the first token of an answer to its last."""
        took: float = self._answer(ids, tokens + 1).total_completion_time_sec
        return took


if __name__ == "__main__":
    main(MistralRs)
