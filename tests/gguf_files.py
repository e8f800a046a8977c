"""GGUF files for tests, written with the package `gguf` as llama.cpp's converter writes them.

`convert` makes one of a Gemma 4 checkpoint in Hugging Face's format, and a copy of the checkpoint with the values that
gguf-py reads from it; `write` makes one of any keys and tensors.
"""

import json
import os
import shutil
from collections.abc import Mapping, Sequence
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import GGMLQuantizationType, GGUFWriter, TensorNameMap, get_tensor_name_map
from gguf.constants import GGML_QUANT_SIZES, MODEL_ARCH
from gguf.quants import dequantize, quantize
from safetensors.torch import load_file, save_file

Kind = GGMLQuantizationType
Tensors = dict[str, tuple[np.ndarray, GGMLQuantizationType]]
K_TYPES = (Kind.Q4_K, Kind.Q5_K, Kind.Q6_K)


def write(
    file: Path,
    keys: Mapping[str, Any],
    tensors: Mapping[str, tuple[np.ndarray, GGMLQuantizationType]],
) -> Path:
    """Writes `keys` (ints as uint32, floats as float32, lists) and `tensors`, each with its type: bytes for quantized
    ones, values for others."""
    writer = _writer(file, keys)
    for name, (data, kind) in tensors.items():
        writer.add_tensor(name, data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


def outline(
    file: Path,
    keys: Mapping[str, Any],
    tensors: Mapping[str, tuple[tuple[int, ...], GGMLQuantizationType]],
) -> Path:
    """The same of shapes and types alone: where tensors would be, the file has a hole, so that it may be of any size."""
    writer = _writer(file, keys)
    total = 0
    for name, (shape, kind) in tensors.items():
        count, size = GGML_QUANT_SIZES[kind]
        bytes_ = prod(shape) // count * size
        writer.add_tensor_info(name, shape, np.dtype(np.float32), bytes_, raw_dtype=kind)
        total += writer.ggml_pad(bytes_, writer.data_alignment)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    writer.close()
    os.truncate(file, writer.ggml_pad(file.stat().st_size, writer.data_alignment) + total)
    return file


def _writer(file: Path, keys: Mapping[str, Any]) -> GGUFWriter:
    writer = GGUFWriter(file, str(keys.get("general.architecture", "gemma4")))
    for key, value in keys.items():
        if key == "general.architecture":
            continue
        if isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, int):
            writer.add_uint32(key, value)
        elif isinstance(value, float):
            writer.add_float32(key, value)
        elif isinstance(value, str):
            writer.add_string(key, value)
        else:
            writer.add_array(key, value)
    return writer


def blocks(values: torch.Tensor, kind: GGMLQuantizationType, seed: int) -> np.ndarray:
    """`values` in the type `kind`. gguf-py cannot write the K types: then random blocks, of values about as large."""
    if kind not in K_TYPES:
        return quantize(values.float().numpy(), kind)
    count, size = GGML_QUANT_SIZES[kind]
    *rows, columns = values.shape
    random = np.random.default_rng(seed)
    data = random.integers(0, 256, (*rows, columns // count, size), dtype=np.uint8)
    scale = 2 * columns**-0.5 * random.uniform(0.5, 1.5, (*rows, columns // count, 1))
    if kind is Kind.Q6_K:
        data[..., -2:] = (scale / (127 * 32)).astype(np.float16).view(np.uint8)
    else:
        most = 15 if kind is Kind.Q4_K else 31
        data[..., :2] = (scale / (63 * most)).astype(np.float16).view(np.uint8)
        data[..., 2:4] = (scale / 2 / 63).astype(np.float16).view(np.uint8)
    return data.reshape(*rows, -1)


def parts_of(
    folder: Path, kind: GGMLQuantizationType | Sequence[GGMLQuantizationType] = Kind.BF16
) -> tuple[dict[str, Any], Tensors, dict[str, torch.Tensor]]:
    """Metadata and tensors of the Gemma 4 checkpoint in `folder`, matrices and experts in the type `kind`, or one of several in turn,
    where their rows allow it, the rest in float32; and by Hugging Face's names the values that gguf-py reads of them."""
    kinds = [kind] if isinstance(kind, GGMLQuantizationType) else kind
    config = json.loads((folder / "config.json").read_text())
    names = get_tensor_name_map(MODEL_ARCH.GEMMA4, config["num_hidden_layers"])
    tensors: Tensors = {}
    read: dict[str, torch.Tensor] = {}
    for seed, (name, values) in enumerate(sorted(load_file(folder / "model.safetensors").items())):
        own = kinds[seed % len(kinds)]
        if values.ndim < 2 or values.shape[-1] % GGML_QUANT_SIZES[own][0]:
            own = Kind.F32
        data = blocks(values, own, seed)
        tensors[gguf_name(name, names)] = data, own
        read[name] = torch.from_numpy(dequantize(data, own).copy()).to(values.dtype)
    half = config["global_head_dim"] // 2
    turning = int(config["rope_parameters"]["full_attention"]["partial_rotary_factor"] * half)
    factors = np.array([1.0] * turning + [1e30] * (half - turning), np.float32)
    tensors["rope_freqs.weight"] = factors, Kind.F32
    return keys_of(config), tensors, read


def convert(
    folder: Path,
    file: Path,
    kind: GGMLQuantizationType | Sequence[GGMLQuantizationType] = Kind.BF16,
    *,
    truth: Path | None = None,
) -> Path:
    """Writes the checkpoint in `folder` to `file` (see `parts_of`); with `truth` also a copy of the folder, with the values that
    gguf-py reads."""
    keys, tensors, read = parts_of(folder, kind)
    if truth is not None:
        shutil.copytree(folder, truth)
        save_file(read, truth / "model.safetensors")
    return write(file, keys, tensors)


def with_gates_apart(tensors: Tensors) -> Tensors:
    """Each layer's fused experts as two tensors, as llama.cpp reads them too."""
    found: Tensors = {}
    for name, (data, kind) in tensors.items():
        if "ffn_gate_up_exps" in name:
            gate, up = np.split(data, 2, axis=1)
            found[name.replace("gate_up", "gate")] = np.ascontiguousarray(gate), kind
            found[name.replace("gate_up", "up")] = np.ascontiguousarray(up), kind
        else:
            found[name] = data, kind
    return found


def gguf_name(name: str, names: TensorNameMap) -> str:
    """The name that llama.cpp's converter gives the tensor `name`."""
    by_hand = {
        "router.scale": "ffn_gate_inp.scale",
        "router.per_expert_scale": "ffn_down_exps.scale",
    }
    for ending, own in by_hand.items():
        if name.endswith(ending):
            return f"blk.{name.split('.')[2]}.{own}"
    if name.endswith(("layer_scalar", "experts.gate_up_proj", "experts.down_proj")):
        name += ".weight"
    found = names.get_name(name, try_suffixes=(".weight",))
    assert found is not None, name
    return found


def keys_of(config: Mapping[str, Any]) -> dict[str, Any]:
    """The metadata that the converter writes for a Gemma 4 text model."""
    slides = [kind == "sliding_attention" for kind in config["layer_types"]]
    owners = config["num_hidden_layers"] - config["num_kv_shared_layers"]
    width = config["intermediate_size"]
    double = 2 if config["use_double_wide_mlp"] else 1
    full_heads = config["num_global_key_value_heads"] or config["num_key_value_heads"]
    rope = config["rope_parameters"]
    keys = {
        "context_length": config["max_position_embeddings"],
        "embedding_length": config["hidden_size"],
        "block_count": config["num_hidden_layers"],
        "feed_forward_length": [
            width if i < owners else width * double for i in range(len(slides))
        ],
        "attention.head_count": config["num_attention_heads"],
        "attention.head_count_kv": [
            config["num_key_value_heads"] if slide else full_heads for slide in slides
        ],
        "attention.layer_norm_rms_epsilon": config["rms_norm_eps"],
        "attention.key_length": config["global_head_dim"],
        "attention.value_length": config["global_head_dim"],
        "attention.key_length_swa": config["head_dim"],
        "attention.value_length_swa": config["head_dim"],
        "attention.sliding_window": config["sliding_window"],
        "attention.sliding_window_pattern": slides,
        "attention.shared_kv_layers": config["num_kv_shared_layers"],
        "embedding_length_per_layer_input": config["hidden_size_per_layer_input"],
        "rope.freq_base": rope["full_attention"]["rope_theta"],
        "rope.freq_base_swa": rope["sliding_attention"]["rope_theta"],
        "rope.dimension_count": config["global_head_dim"],
        "rope.dimension_count_swa": config["head_dim"],
    }
    if config.get("enable_moe_block"):
        keys |= {
            "expert_count": config["num_experts"],
            "expert_used_count": config["top_k_experts"],
            "expert_feed_forward_length": config["moe_intermediate_size"],
        }
    if config["final_logit_softcapping"] is not None:
        keys["final_logit_softcapping"] = config["final_logit_softcapping"]
    tokenizer = {
        "tokenizer.ggml.model": "gemma4",
        "tokenizer.ggml.tokens": [f"t{i}" for i in range(config["vocab_size"])],
        "tokenizer.ggml.eos_token_id": 1,
        "tokenizer.ggml.eot_token_id": 106,
    }
    return (
        {"general.architecture": "gemma4"} | {f"gemma4.{k}": v for k, v in keys.items()} | tokenizer
    )
