//! Gemma 4's text model in Hugging Face's words: embedding, layers, norm, head. Gemma 3 is the same model with less in it
//! (`config::Traits`).
//!
//! One function, [`Gemma4::forward`], takes B slots of T tokens each and gives logits. It reads no
//! tensor's data and branches on none, so it can run on real weights or be captured with fake ones.

mod attention;
mod embedding;
mod experts;
mod layer;
mod linear;
mod mlp;
mod norm;
mod rope;

use embedding::{Embedding, PerLayerInput};
use layer::DecoderLayer;
use linear::Linear;
use norm::RmsNorm;
use rope::RotaryEmbedding;

use crate::{
    aten::{DType, Tensor},
    cache::{Cache, Keep, StepPlan},
    config::{Config, LayerType},
    error::{Error, Result},
    weights::{Arithmetic, Weights, owner},
};

/// The weights of a text model, and nothing else.
pub(crate) struct Gemma4 {
    embed_tokens: Embedding,
    per_layer_input: Option<PerLayerInput>,
    layers: Vec<DecoderLayer>,
    layer_types: Vec<LayerType>,
    first_shared_layer: usize,
    rope: [Option<RotaryEmbedding>; 2],
    norm: RmsNorm,
    /// A head of its own, or `None`: the embedding is used.
    lm_head: Option<Linear>, // [vocab, hidden]
    final_logit_softcapping: Option<f64>,
    dtype: DType,
}

impl Gemma4 {
    /// Takes every tensor of the model from `weights`; `like` names device and element type.
    /// `on_layer(done, all)` is called after each layer.
    ///
    /// # Errors
    /// What [`Weights::take`] and [`Weights::check_all_taken`] give.
    pub(crate) fn load(
        config: &Config,
        weights: &mut Weights,
        like: &Tensor,
        on_layer: &mut dyn FnMut(usize, usize) -> Result<()>,
    ) -> Result<Self> {
        let count = config.layers.len();
        let embed_tokens = Embedding::load(config, weights, like)?;
        let per_layer_input = PerLayerInput::load(config, weights, like)?;
        let mut layers = Vec::with_capacity(count);
        for layer_idx in 0..count {
            layers.push(DecoderLayer::load(layer_idx, config, weights)?);
            on_layer(layer_idx + 1, count)?;
        }
        let norm = RmsNorm::load(weights, "model.norm.weight", config.hidden_size, config)?;
        let head_shape = [config.vocab_size, config.hidden_size];
        let lm_head = if weights.has("lm_head.weight") {
            Some(Linear::load(weights, "lm_head.weight", head_shape)?)
        } else if weights.arithmetic() == Arithmetic::Compiled {
            // A second form of the table: one to look rows up in, one to multiply with.
            Some(Linear::load(weights, "model.embed_tokens.weight", head_shape)?)
        } else {
            None
        };
        let first_shared_layer = config.first_shared_layer();
        weights.check_all_taken(|name| is_unused_kv(name, first_shared_layer..count))?;

        let rope_of = |layer_type: LayerType| {
            let head_dim =
                config.layers.iter().find(|l| l.layer_type == layer_type).map(|l| l.head_dim);
            match (&config.rope[layer_type.index()], head_dim) {
                (Some(rope), Some(dim)) => RotaryEmbedding::new(rope, dim, like).map(Some),
                _ => Ok(None),
            }
        };
        Ok(Self {
            embed_tokens,
            per_layer_input,
            layers,
            layer_types: config.layers.iter().map(|layer| layer.layer_type).collect(),
            first_shared_layer,
            rope: [rope_of(LayerType::Sliding)?, rope_of(LayerType::Full)?],
            norm,
            lm_head,
            final_logit_softcapping: config.final_logit_softcapping,
            dtype: like.dtype()?,
        })
    }

    /// Runs `token_ids` `[B, T]` at `positions` `[B, T]`, adds their keys and values to `cache` as
    /// `plan` says, and gives logits `[B, kept, vocab]` in the model's element type.
    ///
    /// With [`Keep::Last`] the layers that own no cache run on the kept token only, as transformers'
    /// `generate` does (gemma4.md 2.9): the rows they skip would be read by nobody.
    ///
    /// # Errors
    /// `Aten` when an operation fails.
    pub(crate) fn forward(
        &self,
        (token_ids, positions): (&Tensor, &Tensor),
        plan: &StepPlan,
        keep: &Keep,
        cache: &mut Cache,
    ) -> Result<Tensor> {
        let mut h = self.embed_tokens.forward(token_ids)?;
        let mut per_layer = match &self.per_layer_input {
            Some(input) => Some(input.forward(token_ids, &h)?), // [B, T, layers, P]
            None => None,
        };
        let mut rotations = [None, None];
        for (rotation, rope) in rotations.iter_mut().zip(&self.rope) {
            *rotation = match rope {
                Some(rope) => Some(rope.at(positions, self.dtype)?),
                None => None,
            };
        }
        let tokens = token_ids.sizes()?[1];
        let mut sliced_plan = None;
        let mut produced: Vec<_> = self.layers.iter().map(|_| None).collect();
        for (layer_idx, layer) in self.layers.iter().enumerate() {
            if layer_idx == self.first_shared_layer && tokens > 1 && !matches!(keep, Keep::All) {
                h = keep.of(&h, 1)?;
                per_layer = per_layer.map(|input| keep.of(&input, 1)).transpose()?;
                for rotation in &mut rotations {
                    *rotation = rotation.as_ref().map(|r| r.keep(keep)).transpose()?;
                }
                sliced_plan = Some(plan.keep(keep)?);
            }
            let layer_type = self.layer_types[layer_idx].index();
            let plan = sliced_plan.as_ref().unwrap_or(plan);
            let (Some(rotation), Some(plan)) = (&rotations[layer_type], &plan.types[layer_type])
            else {
                return Err(Error::Internal(format!("no plan for layer {layer_idx}")));
            };
            let input = match &per_layer {
                Some(all) => Some(all.select(2, layer_idx as i64)?),
                None => None,
            };
            h = layer.forward(&h, input.as_ref(), rotation, plan, (&mut *cache, &mut produced))?;
        }
        if sliced_plan.is_none() && tokens > 1 {
            h = keep.of(&h, 1)?;
        }
        self.head(&h)
    }

    /// Every tensor of the model, in a fixed order: a step is captured with others in their places.
    pub(crate) fn tensors_mut(&mut self) -> Vec<&mut Tensor> {
        let mut all = Vec::new();
        self.embed_tokens.tensors_mut(&mut all);
        if let Some(input) = &mut self.per_layer_input {
            input.tensors_mut(&mut all);
        }
        for layer in &mut self.layers {
            layer.tensors_mut(&mut all);
        }
        for rope in self.rope.iter_mut().flatten() {
            rope.tensors_mut(&mut all);
        }
        self.norm.tensors_mut(&mut all);
        if let Some(lm_head) = &mut self.lm_head {
            lm_head.tensors_mut(&mut all);
        }
        all
    }

    /// Final norm, head and soft cap (gemma4.md 2.8): `[B, T, hidden]` → `[B, T, vocab]`.
    fn head(&self, h: &Tensor) -> Result<Tensor> {
        let h = self.norm.forward(h)?;
        let logits = match &self.lm_head {
            Some(lm_head) => lm_head.forward(&h)?,
            None => h.linear(&self.embed_tokens.weight)?,
        };
        match self.final_logit_softcapping {
            // In the model's element type: its rounding makes ties that decide greedy choices.
            Some(cap) => logits.div_scalar(cap)?.tanh()?.mul_scalar(cap),
            None => Ok(logits),
        }
    }
}

/// Keys and values that some uploads keep for layers which never use them (gemma4.md 3.3).
pub(crate) fn is_unused_kv(name: &str, shared_layers: std::ops::Range<usize>) -> bool {
    let Some((layer, rest)) = name.strip_prefix("model.layers.").and_then(|n| n.split_once('.'))
    else {
        return false;
    };
    layer.parse().is_ok_and(|layer| shared_layers.contains(&layer))
        && ["self_attn.k_proj", "self_attn.v_proj", "self_attn.k_norm"].contains(&owner(rest))
}
