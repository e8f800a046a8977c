//! One decoder layer (gemma4.md 2.5, 2.6): attention, MLP, per-layer input, each normed before it is added.

use half::bf16;

use super::{
    Parts,
    experts::Experts,
    norm_weight,
    rope::{RotaryEmbedding, Rotation},
};
use crate::{
    config::{Config, KeyValues as Plan, LayerType},
    error::Result,
    kernels::{
        Kernels, KeyValues, Matrix, Product, add_normed, attend, each_row, gated, gelu_times,
        multiply, narrow, norm, norm_and_rotate,
    },
    weights::Weights,
};

/// Weights of one layer. Norms stand in float32.
pub(super) struct Layer {
    layer_idx: usize,
    layer_type: LayerType,
    head_dim: usize,
    heads: usize,
    /// Positions that a query sees, its own included.
    window: usize,
    eps: f32,
    pub(super) input_layernorm: Vec<f32>,
    q_proj: Matrix, // [heads · head_dim, hidden]
    /// With the factor of the scores in it.
    q_norm: Vec<f32>,
    own: Option<OwnKeyValues>,
    /// The layer whose keys and values are read.
    producer: usize,
    o_proj: Matrix, // [hidden, heads · head_dim]
    post_attention_layernorm: Vec<f32>,
    pre_feedforward_layernorm: Vec<f32>,
    gate_proj: Matrix, // [intermediate, hidden]
    up_proj: Matrix,   // [intermediate, hidden]
    down_proj: Matrix, // [hidden, intermediate]
    /// Beside the MLP; `None` in models without.
    experts: Option<Experts>,
    post_feedforward_layernorm: Vec<f32>,
    per_layer: Option<PerLayerGate>,
    layer_scalar: f32,
}

struct OwnKeyValues {
    k_proj: Matrix, // [kv_heads · head_dim, hidden]
    /// `None` where V is the raw K projection (`attention_k_eq_v`).
    v_proj: Option<Matrix>,
    k_norm: Vec<f32>,
    /// Values are normed, or used as they are projected (Gemma 3).
    norms_values: bool,
}

/// The layer's use of its per-layer input.
struct PerLayerGate {
    per_layer_input_gate: Matrix, // [P, hidden]
    per_layer_projection: Matrix, // [hidden, P]
    post_per_layer_input_norm: Vec<f32>,
}

/// What a layer computes on the way; each part writes all that the next one reads, and the next layer begins anew. Kept from layer to
/// layer and step to step, since new memory costs as much as a norm over it.
#[derive(Default)]
pub(super) struct Buffers {
    q_raw: Vec<f32>,
    k_raw: Vec<f32>,
    v_raw: Vec<f32>,
    q: Vec<bf16>,
    k: Vec<bf16>,
    v: Vec<bf16>,
    attended: Vec<bf16>,
    added: Vec<f32>,
    inner: Vec<bf16>,
    gates: Vec<f32>,
}

/// The first `len` values of `buffer`, which only grows.
fn room<T: Clone + Default>(buffer: &mut Vec<T>, len: usize) -> &mut [T] {
    if buffer.len() < len {
        buffer.resize(len, T::default());
    }
    &mut buffer[..len]
}

/// Positions of the tokens that go through a layer together.
pub(super) struct Step {
    pub(super) start: usize,
    pub(super) tokens: usize,
    /// By [`LayerType::index`].
    rotations: [Option<Rotation>; 2],
}

impl Step {
    pub(super) fn new(start: usize, tokens: usize, rope: &[Option<RotaryEmbedding>; 2]) -> Self {
        let at = |rope: &Option<RotaryEmbedding>| rope.as_ref().map(|rope| rope.at(start, tokens));
        Self { start, tokens, rotations: [at(&rope[0]), at(&rope[1])] }
    }
}

impl Layer {
    pub(super) fn load(layer_idx: usize, config: &Config, weights: &mut Weights) -> Result<Self> {
        let plan = &config.layers[layer_idx];
        let (hidden, dim) = (config.hidden_size, plan.head_dim);
        let (q_width, kv_width) =
            (config.num_attention_heads * dim, plan.num_key_value_heads * dim);
        let (intermediate, per_layer) =
            (plan.intermediate_size, config.hidden_size_per_layer_input);
        let name = |name: &str| format!("model.layers.{layer_idx}.{name}.weight");
        let owns = match plan.key_values {
            Plan::Own { k_eq_v } => Some(k_eq_v),
            Plan::Shared { .. } => None,
        };
        let layer_scalar = if config.traits.has_layer_scalar {
            weights.take_vector(&format!("model.layers.{layer_idx}.layer_scalar"), 1)?[0]
        } else {
            1.0
        };
        let mut vector = |of: &str, len| norm_weight(weights, &name(of), len, config);
        let input_layernorm = vector("input_layernorm", hidden)?;
        // Scaled here instead of at every score. A power of two, as 256^-0.5 is, changes no bit of what follows; any other
        // factor moves a rounding that is there anyway.
        let scale = config.traits.attention_scale.unwrap_or(1.0) as f32;
        let q_norm = vector("self_attn.q_norm", dim)?.iter().map(|w| w * scale).collect();
        let k_norm = owns.map(|_| vector("self_attn.k_norm", dim)).transpose()?;
        let post_attention_layernorm = vector("post_attention_layernorm", hidden)?;
        let pre_feedforward_layernorm = vector("pre_feedforward_layernorm", hidden)?;
        let post_feedforward_layernorm = vector("post_feedforward_layernorm", hidden)?;
        let post_per_layer_input_norm =
            (per_layer > 0).then(|| vector("post_per_layer_input_norm", hidden)).transpose()?;
        let mut matrix = |of: &str, shape| weights.take_stored(&name(of), shape);
        let own = match (owns, k_norm) {
            (Some(k_eq_v), Some(k_norm)) => Some(OwnKeyValues {
                k_proj: matrix("self_attn.k_proj", [kv_width, hidden])?,
                v_proj: if k_eq_v {
                    None
                } else {
                    Some(matrix("self_attn.v_proj", [kv_width, hidden])?)
                },
                k_norm,
                norms_values: config.traits.norms_values,
            }),
            _ => None,
        };
        let per_layer = match post_per_layer_input_norm {
            Some(post_per_layer_input_norm) => Some(PerLayerGate {
                per_layer_input_gate: matrix("per_layer_input_gate", [per_layer, hidden])?,
                per_layer_projection: matrix("per_layer_projection", [hidden, per_layer])?,
                post_per_layer_input_norm,
            }),
            None => None,
        };
        Ok(Self {
            layer_idx,
            layer_type: plan.layer_type,
            head_dim: dim,
            heads: config.num_attention_heads,
            window: match plan.layer_type {
                LayerType::Sliding => config.sliding_window,
                LayerType::Full => usize::MAX,
            },
            eps: config.rms_norm_eps as f32,
            input_layernorm,
            q_proj: matrix("self_attn.q_proj", [q_width, hidden])?,
            q_norm,
            own,
            producer: match plan.key_values {
                Plan::Own { .. } => layer_idx,
                Plan::Shared { producer } => producer,
            },
            o_proj: matrix("self_attn.o_proj", [hidden, q_width])?,
            post_attention_layernorm,
            pre_feedforward_layernorm,
            gate_proj: matrix("mlp.gate_proj", [intermediate, hidden])?,
            up_proj: matrix("mlp.up_proj", [intermediate, hidden])?,
            down_proj: matrix("mlp.down_proj", [hidden, intermediate])?,
            experts: Experts::load(&format!("model.layers.{layer_idx}."), config, weights)?,
            post_feedforward_layernorm,
            per_layer,
            layer_scalar,
        })
    }

    /// `h` and `x` `[tokens, hidden]`: the residual stream, and it after this layer's `input_layernorm`; both become those
    /// of what follows, whose norm is `next_norm`. `per_layer_inputs` `[tokens, layers, P]`, of layers from the given one on.
    pub(super) fn forward(
        &self,
        (kernels, parts): (&Kernels, &mut Parts),
        (h, x): (&mut [f32], &mut [bf16]),
        (per_layer_inputs, first): (&[f32], usize),
        (step, cache, buffers): (&Step, &mut [Vec<KeyValues>], &mut Buffers),
        next_norm: &[f32],
    ) -> Result<()> {
        let (set, eps, tokens) = (kernels.set, self.eps, step.tokens);
        let width = self.input_layernorm.len();
        // What a part adds is normed, added, and the sum normed for the part that comes next.
        let add = |h: &mut [f32],
                   (added, weight, scale): (&[f32], &[f32], f32),
                   (next, x): (&[f32], &mut [bf16])| {
            each_row(kernels, tokens, (h, width), (x, width), &|token, h, x| {
                let added = &added[token * width..(token + 1) * width];
                add_normed(set, h, added, weight, eps, scale);
                norm(set, h, Some(next), eps, x);
            })
        };
        self.attend((kernels, parts), x, step, cache, buffers)?;
        let added = room(&mut buffers.added, tokens * width);
        let attended = &buffers.attended[..tokens * self.heads * self.head_dim];
        multiply(kernels, attended, &mut [Product::whole(&self.o_proj, added)])?;
        parts.end("o_proj", self.o_proj.bytes());
        let weight = &self.post_attention_layernorm;
        add(h, (added, weight, 1.0), (&self.pre_feedforward_layernorm, x))?;
        parts.end("norms", 0);

        let inner = room(&mut buffers.inner, tokens * self.gate_proj.shape()[0]);
        gated(kernels, x, (&self.gate_proj, &self.up_proj), inner)?;
        parts.end("gate_up", self.gate_proj.bytes() + self.up_proj.bytes());
        multiply(kernels, inner, &mut [Product::whole(&self.down_proj, added)])?;
        parts.end("down_proj", self.down_proj.bytes());
        if let Some(experts) = &self.experts {
            parts.end("experts", experts.beside(kernels, h, added)?);
        }

        let weight = &self.post_feedforward_layernorm;
        let Some(gate) = &self.per_layer else {
            add(h, (added, weight, self.layer_scalar), (next_norm, x))?;
            parts.end("norms", 0);
            return Ok(());
        };
        // Its gate takes the stream as it is.
        each_row(kernels, tokens, (&mut *h, width), (&mut *x, width), &|token, h, x| {
            let added = &added[token * width..(token + 1) * width];
            add_normed(set, h, added, weight, eps, 1.0);
            narrow(set, h, x);
        })?;
        parts.end("norms", 0);
        let [p, _] = gate.per_layer_input_gate.shape();
        let gates = room(&mut buffers.gates, tokens * p);
        multiply(kernels, x, &mut [Product::whole(&gate.per_layer_input_gate, gates)])?;
        let inner = room(&mut buffers.inner, tokens * p);
        let all = per_layer_inputs.len() / tokens;
        let own = (self.layer_idx - first) * p..(self.layer_idx - first + 1) * p;
        for ((inner, gates), inputs) in inner
            .chunks_exact_mut(p)
            .zip(gates.chunks_exact(p))
            .zip(per_layer_inputs.chunks_exact(all))
        {
            gelu_times(set, gates, &inputs[own.clone()], inner);
        }
        multiply(kernels, inner, &mut [Product::whole(&gate.per_layer_projection, added)])?;
        parts.end(
            "per_layer",
            gate.per_layer_input_gate.bytes() + gate.per_layer_projection.bytes(),
        );
        each_row(kernels, tokens, (h, width), (x, width), &|token, h, x| {
            let added = &added[token * width..(token + 1) * width];
            add_normed(set, h, added, &gate.post_per_layer_input_norm, eps, self.layer_scalar);
            norm(set, h, Some(next_norm), eps, x);
        })?;
        parts.end("norms", 0);
        Ok(())
    }

    /// Fills `buffers.attended` with what the heads attend to, `[tokens, heads · head_dim]`, and writes this layer's keys and values
    /// to `cache`.
    fn attend(
        &self,
        (kernels, parts): (&Kernels, &mut Parts),
        x: &[bf16],
        step: &Step,
        cache: &mut [Vec<KeyValues>],
        buffers: &mut Buffers,
    ) -> Result<()> {
        let (set, tokens, dim) = (kernels.set, step.tokens, self.head_dim);
        let q_width = self.heads * dim;
        let kv_width = self.own.as_ref().map_or(0, |own| own.k_proj.shape()[0]);
        let q_raw = room(&mut buffers.q_raw, tokens * q_width);
        let k_raw = room(&mut buffers.k_raw, tokens * kv_width);
        let v_raw = room(&mut buffers.v_raw, tokens * kv_width);
        let mut products = vec![Product::whole(&self.q_proj, q_raw)];
        if let Some(own) = &self.own {
            products.push(Product::whole(&own.k_proj, k_raw));
            if let Some(v_proj) = &own.v_proj {
                products.push(Product::whole(v_proj, v_raw));
            }
        }
        let bytes = products.iter().map(|product| product.matrix.bytes()).sum();
        multiply(kernels, x, &mut products)?;
        parts.end("qkv", bytes);
        let (q_raw, k_raw, v_raw) = (&buffers.q_raw, &buffers.k_raw, &buffers.v_raw);

        let Some(rotation) = &step.rotations[self.layer_type.index()] else {
            return Err(crate::error::Error::Internal(format!(
                "no rope in layer {}",
                self.layer_idx
            )));
        };
        let rotate = |token: usize, raw: &[f32], weight: &[f32], out: &mut [bf16]| {
            for (raw, out) in raw.chunks_exact(dim).zip(out.chunks_exact_mut(dim)) {
                norm_and_rotate(set, raw, weight, self.eps, rotation.of(token), out);
            }
        };
        let q = room(&mut buffers.q, tokens * q_width);
        each_row(kernels, tokens, (&mut *q, q_width), (&mut [(); 0], 0), &|token, q, _| {
            rotate(token, &q_raw[token * q_width..(token + 1) * q_width], &self.q_norm, q);
        })?;
        if let Some(own) = &self.own {
            let values = if own.v_proj.is_some() { v_raw } else { k_raw };
            let k = room(&mut buffers.k, tokens * kv_width);
            let v = room(&mut buffers.v, tokens * kv_width);
            each_row(kernels, tokens, (&mut *k, kv_width), (&mut *v, kv_width), &|token, k, v| {
                let range = token * kv_width..(token + 1) * kv_width;
                rotate(token, &k_raw[range.clone()], &own.k_norm, k);
                if !own.norms_values {
                    narrow(set, &values[range], v);
                    return;
                }
                for (raw, v) in values[range].chunks_exact(dim).zip(v.chunks_exact_mut(dim)) {
                    norm(set, raw, None, self.eps, v);
                }
            })?;
            let heads = cache[self.layer_idx].len();
            for (head, cache) in cache[self.layer_idx].iter_mut().enumerate() {
                for token in 0..tokens {
                    let at = (token * heads + head) * dim;
                    cache.write(step.start + token, &k[at..at + dim], &v[at..at + dim])?;
                }
            }
        }
        parts.end("rotation", 0);
        let attended = room(&mut buffers.attended, tokens * q_width);
        let where_to = (step.start, self.window);
        attend(kernels, q, self.heads, &cache[self.producer], where_to, attended)?;
        parts.end("attention", 0);
        Ok(())
    }
}
