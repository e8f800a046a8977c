//! One decoder layer (gemma4.md 2.5): attention, MLP, per-layer input, each normed before it is added.

use super::{
    attention::{Attention, Produced},
    experts::Experts,
    linear::Linear,
    mlp::Mlp,
    norm::RmsNorm,
    rope::Rotation,
};
use crate::{
    aten::Tensor,
    cache::{Cache, TypePlan},
    config::Config,
    error::Result,
    weights::Weights,
};

/// Weights of one layer.
pub(crate) struct DecoderLayer {
    input_layernorm: RmsNorm,
    self_attn: Attention,
    post_attention_layernorm: RmsNorm,
    pre_feedforward_layernorm: RmsNorm,
    mlp: Mlp,
    /// Beside the MLP; `None` in models without.
    experts: Option<Experts>,
    post_feedforward_layernorm: RmsNorm,
    per_layer: Option<PerLayerGate>,
    layer_scalar: Option<Tensor>, // one element; far from 1 in real checkpoints; none in Gemma 3
}

/// The layer's use of its per-layer input.
struct PerLayerGate {
    per_layer_input_gate: Linear, // [P, hidden]
    per_layer_projection: Linear, // [hidden, P]
    post_per_layer_input_norm: RmsNorm,
}

impl DecoderLayer {
    pub(crate) fn load(layer_idx: usize, config: &Config, weights: &mut Weights) -> Result<Self> {
        let prefix = format!("model.layers.{layer_idx}.");
        let hidden = config.hidden_size;
        let mut norm =
            |name: &str| RmsNorm::load(weights, &format!("{prefix}{name}.weight"), hidden, config);
        let input_layernorm = norm("input_layernorm")?;
        let post_attention_layernorm = norm("post_attention_layernorm")?;
        let pre_feedforward_layernorm = norm("pre_feedforward_layernorm")?;
        let post_feedforward_layernorm = norm("post_feedforward_layernorm")?;
        let width = config.hidden_size_per_layer_input;
        let per_layer = if width == 0 {
            None
        } else {
            let post_per_layer_input_norm = norm("post_per_layer_input_norm")?;
            let mut take = |name: &str, shape: [usize; 2]| {
                Linear::load(weights, &format!("{prefix}{name}.weight"), shape)
            };
            Some(PerLayerGate {
                per_layer_input_gate: take("per_layer_input_gate", [width, hidden])?,
                per_layer_projection: take("per_layer_projection", [hidden, width])?,
                post_per_layer_input_norm,
            })
        };
        let intermediate = config.layers[layer_idx].intermediate_size;
        Ok(Self {
            input_layernorm,
            self_attn: Attention::load(&format!("{prefix}self_attn."), layer_idx, config, weights)?,
            post_attention_layernorm,
            pre_feedforward_layernorm,
            mlp: Mlp::load(&format!("{prefix}mlp."), hidden, intermediate, weights)?,
            experts: Experts::load(&prefix, config, weights)?,
            post_feedforward_layernorm,
            per_layer,
            layer_scalar: if config.traits.has_layer_scalar {
                Some(weights.take(&format!("{prefix}layer_scalar"), &[1])?)
            } else {
                None
            },
        })
    }

    /// `h` `[B, T, hidden]`, `per_layer_input` `[B, T, P]` → the next `h`.
    pub(crate) fn forward(
        &self,
        h: &Tensor,
        per_layer_input: Option<&Tensor>,
        rotation: &Rotation,
        plan: &TypePlan,
        (cache, produced): (&mut Cache, &mut Produced),
    ) -> Result<Tensor> {
        let x = self.input_layernorm.forward(h)?;
        let x = self.self_attn.forward(&x, rotation, plan, cache, produced)?;
        let mut h = h.add(&self.post_attention_layernorm.forward(&x)?)?;

        let mut x = self.mlp.forward(&self.pre_feedforward_layernorm.forward(&h)?)?;
        if let Some(experts) = &self.experts {
            x = experts.beside(&x, &h)?;
        }
        h = h.add(&self.post_feedforward_layernorm.forward(&x)?)?;

        if let (Some(gate), Some(input)) = (&self.per_layer, per_layer_input) {
            let x = gate.per_layer_input_gate.forward(&h)?.gelu_tanh()?.mul(input)?;
            let x = gate.per_layer_projection.forward(&x)?;
            h = h.add(&gate.post_per_layer_input_norm.forward(&x)?)?;
        }
        match &self.layer_scalar {
            Some(scalar) => h.mul(scalar),
            None => Ok(h),
        }
    }

    pub(crate) fn tensors_mut<'a>(&'a mut self, all: &mut Vec<&'a mut Tensor>) {
        self.input_layernorm.tensors_mut(all);
        self.self_attn.tensors_mut(all);
        self.post_attention_layernorm.tensors_mut(all);
        self.pre_feedforward_layernorm.tensors_mut(all);
        self.mlp.tensors_mut(all);
        if let Some(experts) = &mut self.experts {
            experts.tensors_mut(all);
        }
        self.post_feedforward_layernorm.tensors_mut(all);
        if let Some(gate) = &mut self.per_layer {
            gate.per_layer_input_gate.tensors_mut(all);
            gate.per_layer_projection.tensors_mut(all);
            gate.post_per_layer_input_norm.tensors_mut(all);
        }
        all.extend(&mut self.layer_scalar);
    }
}
