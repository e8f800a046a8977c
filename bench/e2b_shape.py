"""A checkpoint of Gemma 4 E2B's exact shape with random weights: 4.63 G parameters, 8.6 GiB.

    python -m bench.e2b_shape FOLDER [--w4a16 [--bf16-tables]]

With `--w4a16` as compressed-tensors with packed tables and head, 2.7 GiB; with `--bf16-tables` only the
projections are packed, and the head is the bfloat16 embedding, 6.2 GiB.

Speed and bits do not depend on what the weights say; they are drawn so that activations stay near 1.
One shard is in memory at a time. Shapes: gemma4.md 1.2 and 3.1 (published config.json of E2B).
"""

import argparse
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from quantize.plan import FORMATS, quantization_config
from tpu import E2B, user_cache

HIDDEN, LAYERS, HEADS, VOCAB, PER_LAYER = 1536, 35, 8, 262144, 256
FIRST_SHARED = 15
WEIGHTS_PER_SHARD = 600_000_000

CONFIG: dict[str, Any] = json.loads((E2B / "config.json").read_text())


def _matrix(rows: int, columns: int) -> torch.Tensor:
    return torch.empty(rows, columns, dtype=torch.bfloat16).normal_(0, columns**-0.5)


def _norm(width: int, mean: float, spread: float) -> torch.Tensor:
    return (mean + spread * torch.randn(width)).to(torch.bfloat16)


def _layer(index: int) -> Iterator[tuple[str, torch.Tensor]]:
    full = CONFIG["layer_types"][index] == "full_attention"
    head_dim = 512 if full else 256
    owns_cache = index < FIRST_SHARED
    mlp = 6144 if owns_cache else 12288
    matrices = {
        "self_attn.q_proj": (HEADS * head_dim, HIDDEN),
        "self_attn.o_proj": (HIDDEN, HEADS * head_dim),
        "mlp.gate_proj": (mlp, HIDDEN),
        "mlp.up_proj": (mlp, HIDDEN),
        "mlp.down_proj": (HIDDEN, mlp),
        "per_layer_input_gate": (PER_LAYER, HIDDEN),
        "per_layer_projection": (HIDDEN, PER_LAYER),
    }
    norms = {
        "input_layernorm": (HIDDEN, 1.0, 0.2),
        "pre_feedforward_layernorm": (HIDDEN, 1.0, 0.2),
        "post_attention_layernorm": (HIDDEN, 0.4, 0.1),
        "post_feedforward_layernorm": (HIDDEN, 0.4, 0.1),
        "post_per_layer_input_norm": (HIDDEN, 0.4, 0.1),
        "self_attn.q_norm": (head_dim, 0.15, 0.03),
    }
    if owns_cache:
        matrices |= {"self_attn.k_proj": (head_dim, HIDDEN), "self_attn.v_proj": (head_dim, HIDDEN)}
        norms |= {"self_attn.k_norm": (head_dim, 1.0, 0.1)}
    for name, shape in matrices.items():
        yield f"{name}.weight", _matrix(*shape)
    for name, of in norms.items():
        yield f"{name}.weight", _norm(*of)
    yield "layer_scalar", torch.tensor([0.9 + 0.1 * (index % 3)], dtype=torch.bfloat16)


def _tensors() -> Iterator[tuple[str, torch.Tensor]]:
    yield "model.norm.weight", _norm(HIDDEN, 5.0, 1.0)
    yield "model.per_layer_projection_norm.weight", _norm(PER_LAYER, 1.0, 0.2)
    yield "model.per_layer_model_projection.weight", _matrix(LAYERS * PER_LAYER, HIDDEN)
    for index in range(LAYERS):
        for name, tensor in _layer(index):
            yield f"model.layers.{index}.{name}", tensor
    yield "model.embed_tokens.weight", _matrix(VOCAB, HIDDEN)
    table = torch.empty(VOCAB, LAYERS * PER_LAYER, dtype=torch.bfloat16)
    yield "model.embed_tokens_per_layer.weight", table.normal_(0, PER_LAYER**-0.5)


def _packed(name: str, shape: tuple[int, ...]) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors of a weight `[out, in]` in four bits, of the same spread as a dense one."""
    rows, columns = shape
    table = "embed_tokens" in name or name.startswith("lm_head")
    spread = (PER_LAYER if "per_layer" in name and table else columns) ** -0.5
    # Integers from -8 to 7 are spread by 4.6.
    scale = (1 + 0.2 * torch.randn(rows, columns // 32).clamp(-2, 2)) * (spread / 4.6)
    words = torch.randint(-(2**31), 2**31, (rows, columns // 8), dtype=torch.int32)
    yield f"{name}_packed", words
    yield f"{name}_scale", scale.to(torch.float16 if table else torch.bfloat16)
    yield f"{name}_shape", torch.tensor(shape)


def _packed_tensors(*, tables: bool) -> Iterator[tuple[str, torch.Tensor]]:
    with torch.device("meta"):
        shapes = [(name, tuple(tensor.shape)) for name, tensor in _tensors()]
    if tables:
        shapes.append(("lm_head.weight", (VOCAB, HIDDEN)))
    for name, shape in shapes:
        if "embed_tokens" in name and not tables:
            spread = (PER_LAYER if "per_layer" in name else HIDDEN) ** -0.5
            yield name, torch.empty(shape, dtype=torch.bfloat16).normal_(0, spread)
        elif len(shape) == 2:
            yield from _packed(name, shape)
        elif name.endswith("layer_scalar"):
            yield name, torch.ones(1, dtype=torch.bfloat16)
        else:
            post = "post_" in name
            mean = 5.0 if name == "model.norm.weight" else 0.4 if post else 1.0
            yield name, _norm(shape[0], 0.15 if "q_norm" in name else mean, 0.1 * mean)


def make(folder: Path, *, w4a16: bool = False, tables: bool = True) -> Path:
    """Writes the checkpoint, unless `folder` has it whole already; returns `folder`.

    With `w4a16` projections are packed, and with `tables` the vocabulary tables and the head too.
    """
    index_file = folder / "model.safetensors.index.json"
    if index_file.is_file():
        return folder
    folder.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(0)
    shard: dict[str, torch.Tensor] = {}
    weight_map: dict[str, str] = {}
    shards = 0

    def flush() -> None:
        nonlocal shards
        file = f"model-{shards:05d}.safetensors"
        save_file(shard, folder / file, {"format": "pt"})
        weight_map.update(dict.fromkeys(shard, file))
        shard.clear()
        shards += 1

    for name, tensor in _packed_tensors(tables=tables) if w4a16 else _tensors():
        shard[name] = tensor
        if sum(held.numel() for held in shard.values()) > WEIGHTS_PER_SHARD:
            flush()
    if shard:
        flush()
    config = dict(CONFIG)
    if w4a16:
        config["tie_word_embeddings"] = not tables
        form = FORMATS["emb4" if tables else "w4a16"]
        config["quantization_config"] = quantization_config(form, [] if tables else ["lm_head"])
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    ends = {"bos_token_id": 2, "pad_token_id": 0, "eos_token_id": [1, 106, 50]}
    (folder / "generation_config.json").write_text(json.dumps(ends))
    # Written last: its presence says that the checkpoint is whole.
    index_file.write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return folder


def prompt(tokens: int) -> list[int]:
    """A random prompt that begins with BOS and holds no control token."""
    generator = torch.Generator().manual_seed(7)
    return [2, *torch.randint(107, 2048, (tokens - 1,), generator=generator).tolist()]


def scratch(kind: str = "bf16") -> Path:
    """Where the checkpoint is kept: $TORCHTPU_SCRATCH, else a cache folder of the user's."""
    root = os.environ.get("TORCHTPU_SCRATCH") or user_cache()
    return Path(root) / f"e2b-shape-{kind}"


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path, nargs="?")
    parser.add_argument("--w4a16", action="store_true")
    parser.add_argument("--bf16-tables", action="store_true")
    arguments = parser.parse_args()
    kind = "w4a16" if arguments.w4a16 else "bf16"
    if arguments.w4a16 and arguments.bf16_tables:
        kind += "-bf16-tables"
    print(
        make(
            arguments.folder or scratch(kind),
            w4a16=arguments.w4a16,
            tables=not arguments.bf16_tables,
        )
    )
