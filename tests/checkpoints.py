"""Random Gemma 4 and Gemma 3 checkpoints in Hugging Face's format, made by transformers' own classes.

Each is seeded and small; together they have every kind of layer and both spellings of full layers'
sizes. `E2B_SLICE` keeps E2B's true widths in few layers, so that its real matrix shapes are judged.
"""

import copy
import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import (
    Gemma3Config,
    Gemma3ForCausalLM,
    Gemma3ForConditionalGeneration,
    Gemma3TextConfig,
    Gemma4ForCausalLM,
    Gemma4TextConfig,
    Gemma4UnifiedForCausalLM,
    Gemma4UnifiedTextConfig,
)

VOCAB = 512

_Gemma3 = Gemma3ForCausalLM | Gemma3ForConditionalGeneration
_Model = Gemma4ForCausalLM | Gemma4UnifiedForCausalLM | _Gemma3

DENSE: dict[str, Any] = {
    "vocab_size": VOCAB,
    "vocab_size_per_layer_input": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 9,
    "layer_types": ["sliding_attention", "sliding_attention", "full_attention"] * 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_global_key_value_heads": None,
    "head_dim": 16,
    "global_head_dim": 32,
    "sliding_window": 8,
    "num_kv_shared_layers": 5,
    "use_double_wide_mlp": True,
    "hidden_size_per_layer_input": 32,
    "attention_k_eq_v": False,
    "max_position_embeddings": 4096,
    "final_logit_softcapping": 30.0,
    "eos_token_id": 1,
}
"""Like E2B: per-layer inputs, shared keys and values, double-wide MLP, grouped queries."""

K_EQ_V: dict[str, Any] = DENSE | {
    "num_kv_shared_layers": 0,
    "use_double_wide_mlp": False,
    "hidden_size_per_layer_input": 0,
    "attention_k_eq_v": True,
    "num_global_key_value_heads": 1,
    "use_bidirectional_attention": "vision",
}
"""Like 31B: values are the raw keys in full layers, which have KV heads of their own; no per-layer input."""

ONE_KV_HEAD: dict[str, Any] = DENSE | {"num_key_value_heads": 1, "final_logit_softcapping": None}
"""E2B's single KV head, and no soft cap."""

NO_GROUPS: dict[str, Any] = DENSE | {"num_key_value_heads": 4, "num_kv_shared_layers": 0}
"""As many KV heads as query heads, nothing shared."""

E4B: dict[str, Any] = DENSE | {
    "num_hidden_layers": 12,
    "layer_types": (["sliding_attention"] * 5 + ["full_attention"]) * 2,
    "num_kv_shared_layers": 5,
    "use_double_wide_mlp": False,
}
"""Two KV heads in both kinds of layers, five sliding layers to a full one, shared layers as wide as the others."""

TWELVE_B: dict[str, Any] = K_EQ_V | {
    "num_hidden_layers": 12,
    "layer_types": (["sliding_attention"] * 5 + ["full_attention"]) * 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "num_global_key_value_heads": 1,
    "model_type": "gemma4_unified_text",
}
"""Classes of its own; eight query heads on the one KV head of a full layer, whose values are the raw keys."""

ABSENT_FROM_UNIFIED = (
    "model_type",
    "hidden_size_per_layer_input",
    "vocab_size_per_layer_input",
)
"""Keys that 12B's config.json does not have."""

THIRTY_ONE_B: dict[str, Any] = TWELVE_B | {
    "model_type": "gemma4_text",
    "num_global_key_value_heads": 2,
}
"""Two KV heads in full layers, half as many as in sliding ones."""

EXPERTS: dict[str, Any] = THIRTY_ONE_B | {
    "num_hidden_layers": 6,
    "layer_types": ["sliding_attention"] * 5 + ["full_attention"],
    "intermediate_size": 96,
    "enable_moe_block": True,
    "num_experts": 8,
    "top_k_experts": 2,
    "moe_intermediate_size": 64,
}
"""Like 26B-A4B: two of eight experts beside the MLP of every layer."""

E2B_SLICE: dict[str, Any] = {
    "vocab_size": 4096,
    "vocab_size_per_layer_input": 4096,
    "hidden_size": 1536,
    "intermediate_size": 6144,
    "num_hidden_layers": 5,
    "layer_types": [
        "sliding_attention",
        "full_attention",
        "sliding_attention",
        "sliding_attention",
        "full_attention",
    ],
    "num_attention_heads": 8,
    "num_key_value_heads": 1,
    "num_global_key_value_heads": None,
    "head_dim": 256,
    "global_head_dim": 512,
    "sliding_window": 512,
    "num_kv_shared_layers": 3,
    "use_double_wide_mlp": True,
    "hidden_size_per_layer_input": 256,
    "attention_k_eq_v": False,
    "max_position_embeddings": 131072,
    "final_logit_softcapping": 30.0,
    "eos_token_id": 1,
}
"""Five of E2B's layers at full width: owners and consumers of both kinds."""

GEMMA3: dict[str, Any] = {
    "model_type": "gemma3_text",
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 7,
    "layer_types": [
        *(["sliding_attention", "sliding_attention", "full_attention"] * 2),
        "sliding_attention",
    ],
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "query_pre_attn_scalar": 21,
    "sliding_window": 8,
    "max_position_embeddings": 4096,
    "rope_parameters": {
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
    },
    "eos_token_id": 1,
}
"""Like 27B: scores scaled by another number than the head's width, linear scaling, grouped queries; ends in a sliding layer."""

GEMMA3_ONE_KV_HEAD: dict[str, Any] = GEMMA3 | {
    "num_key_value_heads": 1,
    "query_pre_attn_scalar": 16,
    "rope_parameters": None,
    "final_logit_softcapping": 20.0,
}
"""The single KV head of 270M and 1B, whose rope is that of the class's defaults; and a soft cap, which no published one has."""

GEMMA3_NO_GROUPS: dict[str, Any] = GEMMA3 | {"num_key_value_heads": 4, "head_dim": 32}
"""As many KV heads as query heads, wider together than the stream."""

GEMMA3_MULTIMODAL: dict[str, Any] = {
    "model_type": "gemma3",
    "text_config": GEMMA3,
    "vision_config": {
        "model_type": "siglip_vision_model",
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "image_size": 28,
        "patch_size": 14,
    },
    "mm_tokens_per_image": 4,
    "image_token_index": 100,
}
"""4B and larger as they are published: the same text model beside a tower."""

GEMMA3_270M_SLICE: dict[str, Any] = {
    "model_type": "gemma3_text",
    "vocab_size": 4096,
    "hidden_size": 640,
    "intermediate_size": 2048,
    "num_hidden_layers": 3,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "head_dim": 256,
    "query_pre_attn_scalar": 256,
    "sliding_window": 512,
    "max_position_embeddings": 32768,
    "eos_token_id": 1,
}
"""Three of Gemma 3 270M's layers at full width."""


@torch.no_grad()
def _randomize(model: _Model, seed: int) -> None:
    """Draws weights that keep activations near 1, with layer scalars and norms away from 1."""
    # Gemma 3 stores what is added to 1.
    one = 1.0 if isinstance(model, _Gemma3) else 0.0
    generator = torch.Generator().manual_seed(seed)

    def around(parameter: torch.Tensor, mean: float, spread: float) -> None:
        parameter.copy_(mean + spread * torch.randn(parameter.shape, generator=generator))

    for name, parameter in [*model.named_parameters(), *model.named_buffers()]:
        if name.endswith(("inv_freq", "embed_scale")):
            continue
        if name.endswith("layer_scalar"):
            parameter.copy_(0.6 + 0.8 * torch.rand(parameter.shape, generator=generator))
        elif name == "model.norm.weight":
            around(
                parameter, 5.0 - one, 1.0
            )  # logits of several units, so that the soft cap counts
        elif "norm" in name and "post_" in name:
            around(parameter, 0.6 - one, 0.15)
        elif name.endswith("q_norm.weight") and not one:
            around(parameter, 2.0 * parameter.shape[0] ** -0.5, 0.05)
        elif name.endswith("q_norm.weight"):
            around(parameter, 1.0, 0.3)  # its scores are divided by a square root
        elif "norm" in name or name.endswith(("router.scale", "per_expert_scale")):
            around(parameter, 1.0 - one, 0.3)
        else:
            around(parameter, 0.0, parameter.shape[-1] ** -0.5)


def make(
    folder: Path,
    settings: Mapping[str, Any] = DENSE,
    *,
    dtype: torch.dtype = torch.bfloat16,
    seed: int = 1,
    saved_form: bool = False,
    max_shard_size: str = "5GB",
) -> Path:
    """Writes config.json, generation_config.json and safetensors to `folder` and returns it.

    Full layers are spelled as on the hub (`global_head_dim`), or with `saved_form` as transformers
    saves them (`per_layer_config`).
    """
    settings = copy.deepcopy(dict(settings))  # the classes change what they are given
    model: _Model
    match settings.get("model_type"):
        case "gemma3_text":
            model = Gemma3ForCausalLM(Gemma3TextConfig(**settings))
        case "gemma3":
            model = Gemma3ForConditionalGeneration(Gemma3Config(**settings))
        case "gemma4_unified_text":
            own = {key: value for key, value in settings.items() if key not in ABSENT_FROM_UNIFIED}
            model = Gemma4UnifiedForCausalLM(Gemma4UnifiedTextConfig(**own))
        case _:
            model = Gemma4ForCausalLM(Gemma4TextConfig(**settings))
    model.eval()
    _randomize(model, seed)
    model.to(dtype).save_pretrained(folder, max_shard_size=max_shard_size)
    file = folder / "config.json"
    config = json.loads(file.read_text())
    if not saved_form and "global_head_dim" in settings:
        config.pop("per_layer_config", None)
        config["global_head_dim"] = settings["global_head_dim"]
        config["num_global_key_value_heads"] = settings["num_global_key_value_heads"]
    file.write_text(json.dumps(config))
    generation = {"bos_token_id": 2, "pad_token_id": 0, "eos_token_id": [1, 106, 50]}
    (folder / "generation_config.json").write_text(json.dumps(generation))
    return folder


def split_experts(folder: Path, fused: Path) -> Path:
    """Writes the checkpoint `fused` to `folder` with experts as repacks for vLLM have them: three projections each."""
    shutil.copytree(fused, folder)
    tensors: dict[str, torch.Tensor] = {}
    for name, tensor in load_file(fused / "model.safetensors").items():
        layer, _, projection = name.rpartition("experts.")
        if projection not in ("gate_up_proj", "down_proj"):
            tensors[name] = tensor
            continue
        for number, expert in enumerate(tensor):
            parts = {"down_proj": expert}
            if projection == "gate_up_proj":
                gate, up = expert.chunk(2)
                parts = {"gate_proj": gate, "up_proj": up}
            for part, weight in parts.items():
                tensors[f"{layer}experts.{number}.{part}.weight"] = weight.clone()
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return folder


def prompt(tokens: int, *, vocab: int = VOCAB, seed: int = 7) -> list[int]:
    """A random prompt that begins with BOS and holds no control token."""
    generator = torch.Generator().manual_seed(seed)
    return [2, *torch.randint(107, vocab, (tokens - 1,), generator=generator).tolist()]
