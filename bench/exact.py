"""What transformers computes, and whether ours are the same bits.

Used by the parity tests and by `make parity-e2b`; transformers is loaded with its defaults (sdpa).
"""

import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, CompressedTensorsConfig, GgufConfig


@dataclass(frozen=True)
class Reference:
    """One prompt run by transformers."""

    prompt: torch.Tensor
    """Logits of every prompt token `[tokens, vocab]`, from one forward; empty if not asked for."""
    steps: torch.Tensor
    """Logits of each generated step `[steps, vocab]`, as float32."""
    new_ids: list[int]
    """The greedy tokens."""


def load_transformers(
    folder: Path, dtype: torch.dtype | str = "auto", *, dequantize: bool = False
) -> Any:
    """transformers' own model of a checkpoint, ready to run (its classes are not typed).

    `dequantize` unpacks packed weights beforehand, which transformers 5.24 needs for packed tables and for zero points.
    """
    options = (
        {"quantization_config": CompressedTensorsConfig(dequantize=True)} if dequantize else {}
    )
    with warnings.catch_warnings():
        # It says that the option wins over the file, which is what is wanted.
        warnings.filterwarnings("ignore", "You passed `quantization_config`")
        model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, **options)
    model.eval()
    # Ends would cut the comparison short.
    model.generation_config.eos_token_id = None
    return model


def load_gguf(file: Path) -> Any:
    """transformers' model of a GGUF file in bfloat16, in most of a minute.

    Unpacked when it is read: packed weights stay so otherwise, their products are float32's, and the model cannot be saved.
    """
    return AutoModelForCausalLM.from_pretrained(
        file.parent,
        gguf_file=file.name,
        dtype=torch.bfloat16,
        quantization_config=GgufConfig(dequantize=True),
    )


@torch.no_grad()
def run_transformers(
    model: Any, ids: list[int], steps: int, *, whole_prompt: bool = True
) -> Reference:
    """Runs `ids` and generates `steps` tokens greedily with a cache."""
    inputs = torch.tensor([ids])
    prompt = model(inputs).logits[0] if whole_prompt else torch.empty(0)
    made = model.generate(
        inputs,
        attention_mask=torch.ones_like(inputs),
        max_new_tokens=steps,
        do_sample=False,
        pad_token_id=0,
        return_dict_in_generate=True,
        output_logits=True,
    )
    return Reference(prompt, torch.cat(made.logits), made.sequences[0, len(ids) :].tolist())


def equal_bits(ours: torch.Tensor, theirs: torch.Tensor) -> str | None:
    """None if every logit is equal; else how many are, and the largest difference.

    `theirs` may be a lossless float32 copy of 16-bit logits, as `generate` gives them.
    """
    theirs = theirs.to(ours.dtype)
    if torch.equal(ours, theirs):
        return None
    same = (ours == theirs).float().mean().item()
    return f"{same:.4%} of logits are equal, largest difference {(ours.float() - theirs.float()).abs().max():.3g}"
