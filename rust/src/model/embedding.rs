//! Token embeddings and the per-layer inputs made of them (gemma4.md 2.2, 2.3).

use super::linear::Linear;
use super::norm::RmsNorm;
use crate::{
    aten::{DType, Tensor},
    config::Config,
    error::Result,
    weights::Weights,
};

/// `embed_tokens`, scaled by sqrt(`hidden_size`).
pub(crate) struct Embedding {
    pub(crate) weight: Tensor, // [vocab, hidden]
    scale: Tensor,             // one element, rounded to the model's type before it multiplies
}

impl Embedding {
    pub(crate) fn load(config: &Config, weights: &mut Weights, like: &Tensor) -> Result<Self> {
        let shape = [config.vocab_size, config.hidden_size];
        let weight = weights.take("model.embed_tokens.weight", &shape)?;
        Ok(Self { weight, scale: scale(config.hidden_size, like)? })
    }

    pub(crate) fn tensors_mut<'a>(&'a mut self, all: &mut Vec<&'a mut Tensor>) {
        all.extend([&mut self.weight, &mut self.scale]);
    }

    /// `token_ids` `[B, T]` → `[B, T, hidden]`.
    pub(crate) fn forward(&self, token_ids: &Tensor) -> Result<Tensor> {
        self.weight.embedding(token_ids)?.mul(&self.scale)
    }
}

/// A vector for each layer and token: a table of its own plus a projection of the embedding.
pub(crate) struct PerLayerInput {
    embed_tokens_per_layer: Tensor, // [vocab, layers · P]; layer i owns columns i·P … i·P + P - 1
    scale: Tensor,
    per_layer_model_projection: Linear, // [layers · P, hidden]
    per_layer_projection_norm: RmsNorm, // over P
    projection_scale: f64,
    layers: i64,
    width: i64,
}

impl PerLayerInput {
    /// `None` for models without (`hidden_size_per_layer_input` 0).
    pub(crate) fn load(
        config: &Config,
        weights: &mut Weights,
        like: &Tensor,
    ) -> Result<Option<Self>> {
        let width = config.hidden_size_per_layer_input;
        if width == 0 {
            return Ok(None);
        }
        let all = config.layers.len() * width;
        let norm = "model.per_layer_projection_norm.weight";
        let per_layer_projection_norm = RmsNorm::load(weights, norm, width, config)?;
        Ok(Some(Self {
            embed_tokens_per_layer: weights.take(
                "model.embed_tokens_per_layer.weight",
                &[config.vocab_size_per_layer_input, all],
            )?,
            scale: scale(width, like)?,
            per_layer_model_projection: Linear::load(
                weights,
                "model.per_layer_model_projection.weight",
                [all, config.hidden_size],
            )?,
            per_layer_projection_norm,
            projection_scale: (config.hidden_size as f64).powf(-0.5),
            layers: config.layers.len() as i64,
            width: width as i64,
        }))
    }

    pub(crate) fn tensors_mut<'a>(&'a mut self, all: &mut Vec<&'a mut Tensor>) {
        all.extend([&mut self.embed_tokens_per_layer, &mut self.scale]);
        self.per_layer_model_projection.tensors_mut(all);
        self.per_layer_projection_norm.tensors_mut(all);
    }

    /// `token_ids` `[B, T]` and their embeddings → `[B, T, layers, P]`.
    pub(crate) fn forward(&self, token_ids: &Tensor, embedded: &Tensor) -> Result<Tensor> {
        let mut shape = token_ids.sizes()?;
        shape.extend([self.layers, self.width]);
        let own = self.embed_tokens_per_layer.embedding(token_ids)?.mul(&self.scale)?;
        let own = own.reshape(&shape)?;
        // These factors are plain numbers in transformers: they multiply in float32, unrounded.
        let context = self
            .per_layer_model_projection
            .forward(embedded)?
            .mul_scalar(self.projection_scale)?
            .reshape(&shape)?;
        let context = self.per_layer_projection_norm.forward(&context)?;
        context.add(&own)?.mul_scalar(2.0_f64.powf(-0.5))
    }
}

/// sqrt(width) in the model's element type: 39.25 for E2B's 1536 in bfloat16.
fn scale(width: usize, like: &Tensor) -> Result<Tensor> {
    Tensor::scalar((width as f64).sqrt(), DType::F32, like)?.type_as(like)
}
