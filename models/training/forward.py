"""The forward pass that training runs: Gemma 4's text model in float32, doing only what the loss needs.

It reads the parameters of transformers' own `Gemma4ForCausalLM` and must give its loss. The KV-shared layers write no keys, so
positions whose next id is not the model's to say leave the pass before them; that halves the work.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F  # noqa: N812 -- PyTorch's own name for it
from torch import Tensor
from transformers import Gemma4ForCausalLM

MASKED = -1e9
Weights = dict[str, Tensor]
Rope = tuple[Tensor, Tensor]


class Batch(NamedTuple):
    """Chats of nearly one length: `ids` [rows, length], and the flat positions whose next id is said, row by row."""

    ids: Tensor
    said_at: Tensor
    said_next: Tensor
    real: int
    """How many of the ids are not padding."""


def make_batch(rows: list[tuple[list[int], list[bool]]]) -> Batch:
    """Pads `rows` of ids and said marks on the right."""
    length = max(len(ids) for ids, _ in rows)
    ids = torch.zeros(len(rows), length, dtype=torch.long)
    at: list[int] = []
    following: list[int] = []
    for row, (tokens, said) in enumerate(rows):
        ids[row, : len(tokens)] = torch.tensor(tokens)
        for i in range(1, len(tokens)):
            if said[i]:
                at.append(row * length + i - 1)
                following.append(tokens[i])
    return Batch(ids, torch.tensor(at), torch.tensor(following), sum(len(t) for t, _ in rows))


def norm(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    """RMSNorm as Gemma 4 has it: the weight multiplies as it is."""
    y = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps)
    return y if weight is None else y * weight


def rotary(positions: int, dim: int, parameters: dict[str, float]) -> tuple[Tensor, Tensor]:
    """Returns cos and sin [positions, dim]; a proportional rope leaves the rest of the head unrotated."""
    turned = int(parameters.get("partial_rotary_factor", 1.0) * dim // 2)
    steps = torch.arange(0, 2 * turned, 2, dtype=torch.float32) / dim
    inverse = torch.cat([parameters["rope_theta"] ** -steps, torch.zeros(dim // 2 - turned)])
    angles = torch.arange(positions, dtype=torch.float32)[:, None] * inverse
    angles = torch.cat([angles, angles], -1)
    return angles.cos(), angles.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotates pairs (j, j + dim / 2)."""
    half = x.shape[-1] // 2
    return x * cos + torch.cat([-x[..., half:], x[..., :half]], -1) * sin


def pointwise_gate(gate: Tensor, up: Tensor) -> Tensor:
    """Returns gelu(gate) * up, the one nonlinearity of the model."""
    return F.gelu(gate, approximate="tanh") * up


def owner_attention(
    w: Weights, x: Tensor, rope: Rope, mask: Tensor, rows: int, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Attention of a layer with its own keys over all positions: the mixed values, and the keys and values for sharing.

    One key head serves every query head, so the heads count as further query rows: [rows, length * heads, dim].
    """
    dim = w["self_attn.q_norm.weight"].shape[0]
    q = queries_of(w, x, rope, eps)
    k = norm(F.linear(x, w["self_attn.k_proj.weight"]), w["self_attn.k_norm.weight"], eps)
    v = norm(F.linear(x, w["self_attn.v_proj.weight"]), None, eps).view(rows, -1, dim)
    k = rotate(k, *rope).view(rows, -1, dim)
    length, heads = k.shape[1], q.shape[1]
    scores = torch.bmm(q.view(rows, length * heads, dim), k.transpose(1, 2)).view(
        rows, length, heads, length
    )
    weights = torch.softmax(scores + mask[:, :, None], -1)
    mixed = torch.bmm(weights.view(rows, length * heads, length), v)
    return F.linear(mixed.view(-1, heads * dim), w["self_attn.o_proj.weight"]), k, v


def shared_attention(w: Weights, x: Tensor, rope: Rope, mask: Tensor, k: Tensor, v: Tensor, row: Tensor, order: Tensor, eps: float) -> Tensor:  # fmt: skip
    """Attention of a KV-shared layer for the kept positions, each at its place (row, order) in a grid of queries."""
    q = queries_of(w, x, rope, eps)
    _, heads, dim = q.shape
    rows, most, length = mask.shape
    grid = q.new_zeros(rows, most, heads, dim).index_put((row, order), q)
    scores = torch.bmm(grid.view(rows, most * heads, dim), k.transpose(1, 2)).view(
        rows, most, heads, length
    )
    weights = torch.softmax(scores + mask[:, :, None], -1)
    mixed = torch.bmm(weights.view(rows, most * heads, length), v).view(rows, most, heads * dim)
    return F.linear(mixed[row, order], w["self_attn.o_proj.weight"])


def queries_of(w: Weights, x: Tensor, rope: Rope, eps: float) -> Tensor:
    """Returns the normed and rotated queries [positions, heads, dim]."""
    weight = w["self_attn.q_norm.weight"]
    q = norm(
        F.linear(x, w["self_attn.q_proj.weight"]).view(x.shape[0], -1, weight.shape[0]), weight, eps
    )
    return rotate(q, rope[0][:, None], rope[1][:, None])


def rest_of_layer(w: Weights, h: Tensor, a: Tensor, extra: Tensor, eps: float) -> Tensor:
    """What follows attention in every layer: the MLP and the per-layer input, each normed before it is added."""
    h = h + norm(a, w["post_attention_layernorm.weight"], eps)
    x = norm(h, w["pre_feedforward_layernorm.weight"], eps)
    x = pointwise_gate(F.linear(x, w["mlp.gate_proj.weight"]), F.linear(x, w["mlp.up_proj.weight"]))
    h = h + norm(
        F.linear(x, w["mlp.down_proj.weight"]), w["post_feedforward_layernorm.weight"], eps
    )
    x = pointwise_gate(F.linear(h, w["per_layer_input_gate.weight"]), extra)
    x = F.linear(x, w["per_layer_projection.weight"])
    return (h + norm(x, w["post_per_layer_input_norm.weight"], eps)) * w["layer_scalar"]


def owner_layer(w: Weights, h: Tensor, extra: Tensor, rope: Rope, mask: Tensor, rows: int, eps: float) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """A layer that owns its keys and values."""
    a, k, v = owner_attention(w, norm(h, w["input_layernorm.weight"], eps), rope, mask, rows, eps)
    return rest_of_layer(w, h, a, extra, eps), k, v


def shared_layer(w: Weights, h: Tensor, extra: Tensor, rope: Rope, mask: Tensor, k: Tensor, v: Tensor, row: Tensor, order: Tensor, eps: float) -> Tensor:  # fmt: skip
    """A layer that reads the keys and values of an earlier one."""
    a = shared_attention(
        w, norm(h, w["input_layernorm.weight"], eps), rope, mask, k, v, row, order, eps
    )
    return rest_of_layer(w, h, a, extra, eps)


class TrainingForward:
    """Computes the loss of a batch from a transformers model's parameters."""

    def __init__(self, model: Gemma4ForCausalLM, longest: int) -> None:
        config = model.config
        self.config = config
        self.weights: Weights = dict(model.named_parameters()) | dict(model.named_buffers())
        self.types = list(config.layer_types or ())
        rope_parameters = config.rope_parameters or {}
        self.first_shared = len(self.types) - config.num_kv_shared_layers
        prefixes = [f"model.layers.{i}." for i in range(len(self.types))]
        self.of_layer = [{n.removeprefix(p): t for n, t in self.weights.items() if n.startswith(p)} for p in prefixes]  # fmt: skip
        dims = [w["self_attn.q_norm.weight"].shape[0] for w in self.of_layer]
        self.ropes = {t: rotary(longest, d, rope_parameters[t]) for t, d in zip(self.types, dims, strict=True)}  # fmt: skip

    def loss(self, batch: Batch) -> Tensor:
        """Returns the mean cross-entropy over the ids that the model says."""
        c, w = self.config, self.weights
        rows, length = batch.ids.shape
        h, extras = self._embed(batch.ids.reshape(-1))
        positions = torch.arange(length)
        distance = positions[:, None] - positions[None]
        hidden = {"full_attention": distance < 0}
        hidden["sliding_attention"] = hidden["full_attention"] | (distance >= c.sliding_window)
        masks = {t: torch.where(m, MASKED, 0.0)[None] for t, m in hidden.items()}
        ropes = {t: (cos[:length].repeat(rows, 1), sin[:length].repeat(rows, 1)) for t, (cos, sin) in self.ropes.items()}  # fmt: skip
        keys: dict[str, tuple[Tensor, Tensor]] = {}
        for i in range(self.first_shared):
            kind = self.types[i]
            h, k, v = owner_layer(
                self.of_layer[i], h, extras[:, i], ropes[kind], masks[kind], rows, c.rms_norm_eps
            )
            keys[kind] = k, v  # the last owner of a kind is the producer
        h, extras = h[batch.said_at], extras[batch.said_at]
        ropes = {t: (cos[batch.said_at], sin[batch.said_at]) for t, (cos, sin) in ropes.items()}
        row, order, query = grid_of(batch, rows, length)
        masks = {t: mask[0][query] for t, mask in masks.items()}
        for i in range(self.first_shared, len(self.types)):
            kind = self.types[i]
            h = shared_layer(self.of_layer[i], h, extras[:, i], ropes[kind], masks[kind], *keys[kind], row, order, c.rms_norm_eps)  # fmt: skip
        h = norm(h, w["model.norm.weight"], c.rms_norm_eps)
        cap = c.final_logit_softcapping or 1.0
        logits = torch.tanh(F.linear(h, w["model.embed_tokens.weight"]) / cap) * cap
        return F.cross_entropy(logits, batch.said_next)

    def _embed(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the scaled embeddings [positions, width] and the per-layer inputs [positions, layers, inner]."""
        c, w = self.config, self.weights
        inner = c.hidden_size_per_layer_input
        h = F.embedding(ids, w["model.embed_tokens.weight"]) * c.hidden_size**0.5
        token = F.embedding(ids, w["model.embed_tokens_per_layer.weight"]) * inner**0.5
        context = F.linear(h, w["model.per_layer_model_projection.weight"]) * c.hidden_size**-0.5
        context = norm(
            context.view(len(ids), -1, inner),
            w["model.per_layer_projection_norm.weight"],
            c.rms_norm_eps,
        )
        return h, (context + token.view(len(ids), -1, inner)) * 2**-0.5


def grid_of(batch: Batch, rows: int, length: int) -> tuple[Tensor, Tensor, Tensor]:
    """Places the kept positions in a grid [rows, most]: the row and order of each, and the position at each place."""
    row, column = batch.said_at // length, batch.said_at % length
    counts = torch.bincount(row, minlength=rows)
    order = torch.arange(len(row)) - (counts.cumsum(0) - counts)[row]
    query = torch.zeros(rows, int(counts.max()), dtype=torch.long)
    query[row, order] = column
    return row, order, query
