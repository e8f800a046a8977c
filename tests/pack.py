"""Packed checkpoints in every form that is read, laid out by compressed-tensors' own code: 4 and 8 bits, groups or rows, zero points.

`quantize/` writes the forms that users make; this one is independent of it, so that our reading is not judged by our writing.
"""

import json
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from compressed_tensors.compressors.pack_quantized.base import PackedQuantizationCompressor
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from compressed_tensors.quantization.utils import calculate_qparams
from safetensors.torch import load_file, save_file

KEPT = (
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
)
TABLES = ("embed_tokens", "embed_tokens_per_layer")


@dataclass(frozen=True)
class Packing:
    """How weights are packed, rounded to nearest; the default is the form of the published W4A16 checkpoints."""

    num_bits: int = 4
    group_size: int | None = 32
    symmetric: bool = True
    scale_dtype: torch.dtype = torch.bfloat16
    tables: bool = False
    """Also the vocabulary tables, with float16 factors, and an own packed head (`-emb4`)."""

    @property
    def arguments(self) -> QuantizationArgs:
        strategy = "channel" if self.group_size is None else "group"
        return QuantizationArgs(
            num_bits=self.num_bits,
            type="int",
            symmetric=self.symmetric,
            strategy=strategy,
            group_size=self.group_size,
        )


def _pack(weight: torch.Tensor, packing: Packing, scale_dtype: torch.dtype) -> dict[str, Any]:
    """The tensors that stand for `weight` `[out, in]`, by the end of their names."""
    size = packing.group_size or weight.shape[1]
    groups = weight.float().reshape(weight.shape[0], -1, size)
    largest, zero = calculate_qparams(groups.amin(-1), groups.amax(-1), packing.arguments)
    scheme = QuantizationScheme(targets=["Linear"], weights=packing.arguments)

    scale = largest.to(scale_dtype)
    state = {"weight": weight.float(), "weight_scale": scale.float()}
    if not packing.symmetric:
        state["weight_zero_point"] = zero.to(torch.int8)
    packed = PackedQuantizationCompressor.compress(state, scheme)
    return {**packed, "weight_scale": scale}


def quantization_config(packing: Packing, left: Sequence[str] = ()) -> dict[str, Any]:
    """As the published checkpoints have it in config.json; `left` are modules that stay as they are."""

    def group(target: str) -> dict[str, Any]:
        weights = json.loads(packing.arguments.model_dump_json())
        return {
            "targets": [target],
            "format": "pack-quantized",
            "input_activations": None,
            "output_activations": None,
            "weights": weights,
        }

    groups = {"group_0": group("Linear")}
    if packing.tables:
        groups |= {f"group_{table}": group(rf"re:.*\.{table}$") for table in TABLES}
        groups["group_lm_head"] = group("re:^lm_head$")
    return {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "quantization_status": "compressed",
        "config_groups": groups,
        "ignore": [*left, *([] if packing.tables else ["lm_head"])],
        "kv_cache_scheme": None,
        "sparsity_config": {},
    }


def make(
    folder: Path, dense: Path, packing: Packing, *, only: str = "", prefix: str = "model."
) -> Path:
    """Writes the packed form of the checkpoint `dense` to `folder`.

    `only` keeps `tables` or `rest` of the tensors; `prefix` replaces `model.` in their names.

    Raises:
        ValueError: with packed tables, when their columns are no whole groups or the head is not tied.
    """
    folder.mkdir(parents=True, exist_ok=True)
    tensors: dict[str, torch.Tensor] = {}
    left: list[str] = []
    for name, tensor in load_file(dense / "model.safetensors").items():
        module = name.removesuffix(".weight")
        last = module.rsplit(".", 1)[-1]
        is_table = last in TABLES
        if only and (only == "tables") != is_table:
            continue
        if packing.tables and last == "lm_head":
            raise ValueError("expected a tied head, found lm_head.weight")
        new = module.replace("model.", prefix, 1)
        wanted = name.endswith(".weight") and tensor.dim() == 2 and (packing.tables or not is_table)
        if wanted and tensor.shape[1] % (packing.group_size or 1) == 0:
            scale_dtype = torch.float16 if is_table else packing.scale_dtype
            parts = _pack(tensor, packing, scale_dtype)
            tensors |= {f"{new}.{ending}": part for ending, part in parts.items()}
            if last == "embed_tokens":
                tensors |= {f"lm_head.{ending}": part.clone() for ending, part in parts.items()}
        else:
            if wanted and is_table:
                raise ValueError(f"expected whole groups of columns, found {name} {tensor.shape}")
            if wanted:
                left.append(new)
            tensors[name.replace("model.", prefix, 1)] = tensor
    save_file(
        {k: t.contiguous() for k, t in tensors.items()},
        folder / "model.safetensors",
        {"format": "pt"},
    )
    config = json.loads((dense / "config.json").read_text())
    config["quantization_config"] = quantization_config(packing, left)
    config["tie_word_embeddings"] = not packing.tables
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    for name in KEPT:
        if (dense / name).is_file():
            shutil.copy(dense / name, folder)
    return folder
