"""Writes the bfloat16 checkpoint of `bench.e2b_shape` as a GGUF file for llama.cpp, value for value, without a vocabulary.

    PYTHONPATH=LLAMA_CPP/gguf-py python -m bench.cpu.gguf_shape CHECKPOINT OUT

The writer is llama.cpp's own `gguf`, from the sources that read the file. Its converter would do the same, but
asks for a tokenizer. Norms are float32, as that converter stores them; everything else keeps its bits.
"""

import argparse
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from safetensors import safe_open

# Hugging Face's names, without `model.` and `.weight`, as the loader of `gemma4` in llama.cpp has them.
WHOLE = {
    "embed_tokens": "token_embd",
    "embed_tokens_per_layer": "per_layer_token_embd",
    "per_layer_model_projection": "per_layer_model_proj",
    "per_layer_projection_norm": "per_layer_proj_norm",
    "norm": "output_norm",
}
IN_LAYER = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "per_layer_input_gate": "inp_gate",
    "per_layer_projection": "proj",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
    "post_per_layer_input_norm": "post_norm",
    "layer_scalar": "layer_output_scale",
}
# What llama.cpp divides a frequency by that is not to turn.
NO_ROTATION = 1e30


def gguf_name(name: str) -> str:
    """The name that llama.cpp gives to the tensor `name` of a checkpoint; KeyError if it has none."""
    short = name.removeprefix("model.").removesuffix(".weight")
    if layer := re.fullmatch(r"layers\.(\d+)\.(.+)", short):
        return f"blk.{layer[1]}.{IN_LAYER[layer[2]]}.weight"
    return f"{WHOLE[short]}.weight"


def _tensors(folder: Path) -> Iterator[tuple[str, torch.Tensor]]:
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    for file in sorted(set(index["weight_map"].values())):
        with safe_open(folder / file, framework="pt") as shard:
            for name in shard.keys():  # noqa: SIM118 - no mapping
                yield name, shard.get_tensor(name)


def _describe(writer: Any, config: dict[str, Any]) -> None:
    layers, shared = config["num_hidden_layers"], config["num_kv_shared_layers"]
    mlp, head, full_head = (
        config[key] for key in ("intermediate_size", "head_dim", "global_head_dim")
    )
    sliding = [kind == "sliding_attention" for kind in config["layer_types"]]
    rope = config["rope_parameters"]
    writer.add_block_count(layers)
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_vocab_size(config["vocab_size"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_embedding_length_per_layer_input(config["hidden_size_per_layer_input"])
    writer.add_feed_forward_length([mlp if i < layers - shared else 2 * mlp for i in range(layers)])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_shared_kv_layers(shared)
    writer.add_sliding_window(config["sliding_window"])
    writer.add_sliding_window_pattern(sliding)
    for add in (writer.add_key_length, writer.add_value_length, writer.add_rope_dimension_count):
        add(full_head)
    for add in (
        writer.add_key_length_swa,
        writer.add_value_length_swa,
        writer.add_rope_dimension_count_swa,
    ):
        add(head)
    writer.add_rope_freq_base(rope["full_attention"]["rope_theta"])
    writer.add_rope_freq_base_swa(rope["sliding_attention"]["rope_theta"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_final_logit_softcapping(config["final_logit_softcapping"])
    writer.add_tokenizer_model("none")
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_BF16)
    turned = int(full_head * rope["full_attention"]["partial_rotary_factor"]) // 2
    factors = np.full(full_head // 2, NO_ROTATION, np.float32)
    factors[:turned] = 1
    writer.add_tensor("rope_freqs.weight", factors)


def write(folder: Path, out: Path) -> Path:
    """Writes the checkpoint `folder` to the file `out`; returns `out`."""
    part = out.with_suffix(".part")
    writer = gguf.GGUFWriter(part, "gemma4")
    _describe(writer, json.loads((folder / "config.json").read_text()))
    for name, tensor in _tensors(folder):
        if tensor.dim() == 1:
            writer.add_tensor(gguf_name(name), tensor.float().numpy())
        else:
            # Bytes of the mapped file, [out, 2 * in]: nothing is copied until they are written.
            bits = tensor.view(torch.uint8).numpy()
            kind = gguf.GGMLQuantizationType.BF16
            writer.add_tensor(gguf_name(name), bits, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    # Renamed last: the name says that the file is whole.
    return part.rename(out)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("out", type=Path)
    arguments = parser.parse_args()
    print(write(arguments.checkpoint, arguments.out))
