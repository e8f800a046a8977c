//! Attention of one layer (gemma4.md 2.6): projections, norms, rotation, and which ATen call attends.
//!
//! Scores are scaled only in Gemma 3: in Gemma 4 the weights of `q_norm` and `k_norm` carry the temperature.

use super::{linear::Linear, norm::RmsNorm, rope::Rotation};
use crate::{
    aten::{DType, Tensor},
    cache::{Attend, Cache, TypePlan},
    config::{Config, KeyValues},
    error::Result,
    weights::Weights,
};

/// Masked scores. Finite, so that a row with no visible key (padding) stays finite too; far below any
/// score, so that its share is exactly zero.
const MASKED: f64 = -1e30;

/// Widest head for which transformers 5.24 lets ATen group the query heads (`use_gqa_in_sdpa`).
const MAX_GROUPED_HEAD_DIM: i64 = 256;

/// Projections and norms of one layer; keys and values only where the layer owns them.
pub(crate) struct Attention {
    layer_idx: usize,
    heads: i64,
    kv_heads: i64,
    head_dim: usize,
    scale: Option<f64>,
    q_proj: Linear, // [heads · head_dim, hidden]
    q_norm: RmsNorm,
    own: Option<OwnKeyValues>,
    producer: usize,
    o_proj: Linear, // [hidden, heads · head_dim]
}

struct OwnKeyValues {
    k_proj: Linear, // [kv_heads · head_dim, hidden]
    /// `None` where V is the raw K projection (`attention_k_eq_v`).
    v_proj: Option<Linear>,
    k_norm: RmsNorm,
    /// `None` where values are used as they are projected (Gemma 3).
    v_norm: Option<RmsNorm>,
}

/// Keys and values that the owners of this step's layers produced, by layer.
pub(crate) type Produced = Vec<Option<(Tensor, Tensor)>>;

impl Attention {
    /// `prefix` ends in `self_attn.`.
    pub(crate) fn load(
        prefix: &str,
        layer_idx: usize,
        config: &Config,
        weights: &mut Weights,
    ) -> Result<Self> {
        let plan = &config.layers[layer_idx];
        let (hidden, dim) = (config.hidden_size, plan.head_dim);
        let q_width = config.num_attention_heads * dim;
        let kv_width = plan.num_key_value_heads * dim;
        let name = |name: &str| format!("{prefix}{name}.weight");
        let arithmetic = weights.arithmetic();
        let mut norm = |norm: &str| RmsNorm::load(weights, &name(norm), dim, config);
        let q_norm = norm("q_norm")?;
        let owns = matches!(plan.key_values, KeyValues::Own { .. });
        let k_norm = if owns { Some(norm("k_norm")?) } else { None };
        let mut take = |linear: &str, shape| Linear::load(weights, &name(linear), shape);
        let own = match (plan.key_values, k_norm) {
            (KeyValues::Own { k_eq_v }, Some(k_norm)) => Some(OwnKeyValues {
                k_proj: take("k_proj", [kv_width, hidden])?,
                v_proj: if k_eq_v { None } else { Some(take("v_proj", [kv_width, hidden])?) },
                k_norm,
                v_norm: config
                    .traits
                    .norms_values
                    .then(|| RmsNorm::without_weight(arithmetic, config)),
            }),
            _ => None,
        };
        Ok(Self {
            layer_idx,
            heads: config.num_attention_heads as i64,
            kv_heads: plan.num_key_value_heads as i64,
            head_dim: dim,
            scale: config.traits.attention_scale,
            q_proj: take("q_proj", [q_width, hidden])?,
            q_norm,
            own,
            producer: match plan.key_values {
                KeyValues::Own { .. } => layer_idx,
                KeyValues::Shared { producer } => producer,
            },
            o_proj: take("o_proj", [hidden, q_width])?,
        })
    }

    pub(crate) fn tensors_mut<'a>(&'a mut self, all: &mut Vec<&'a mut Tensor>) {
        self.q_proj.tensors_mut(all);
        self.q_norm.tensors_mut(all);
        if let Some(own) = &mut self.own {
            own.k_proj.tensors_mut(all);
            if let Some(v_proj) = &mut own.v_proj {
                v_proj.tensors_mut(all);
            }
            own.k_norm.tensors_mut(all);
        }
        self.o_proj.tensors_mut(all);
    }

    /// `x` `[B, T, hidden]` → `[B, T, hidden]`; writes this layer's keys and values to `cache`.
    pub(crate) fn forward(
        &self,
        x: &Tensor,
        rotation: &Rotation,
        plan: &TypePlan,
        cache: &mut Cache,
        produced: &mut Produced,
    ) -> Result<Tensor> {
        let sizes = x.sizes()?;
        let (batch, tokens) = (sizes[0], sizes[1]);
        let dim = self.head_dim as i64;
        let q = self.q_proj.forward(x)?.reshape(&[batch, tokens, self.heads, dim])?;
        let q = rotation.rotate(&self.q_norm.forward(&q)?, self.head_dim)?.transpose(1, 2)?;

        if let Some(own) = &self.own {
            let shape = [batch, tokens, self.kv_heads, dim];
            let k_raw = own.k_proj.forward(x)?.reshape(&shape)?;
            let v_raw = match &own.v_proj {
                Some(v_proj) => v_proj.forward(x)?.reshape(&shape)?,
                None => k_raw.alias()?,
            };
            let k = rotation.rotate(&own.k_norm.forward(&k_raw)?, self.head_dim)?;
            let k = k.transpose(1, 2)?; // [B, kv_heads, T, head_dim]
            let v = match &own.v_norm {
                Some(v_norm) => v_norm.forward(&v_raw)?,
                None => v_raw,
            };
            let v = v.transpose(1, 2)?;
            produced[self.layer_idx] = Some(cache.update(self.layer_idx, &k, &v, plan)?);
        }
        let Some((k, v)) = &produced[self.producer] else {
            return Err(crate::error::Error::Internal(format!(
                "layer {} reads keys of layer {}, which made none",
                self.layer_idx, self.producer
            )));
        };
        let attended = match plan.attend {
            Attend::Fused => self.attend_fused(&q, k, v, plan.mask.as_ref())?,
            Attend::Written => self.attend_written(&q, k, v, plan.mask.as_ref())?,
        };
        let attended = attended // [B, heads, T, head_dim]
            .transpose(1, 2)?
            .reshape(&[batch, tokens, self.heads * dim])?;
        self.o_proj.forward(&attended)
    }

    /// ATen's fused attention, called as transformers 5.24 calls it: which of the calls is made decides
    /// the last bits (gemma4.md section 10).
    fn attend_fused(
        &self,
        q: &Tensor,
        k: &Tensor,
        v: &Tensor,
        mask: Option<&Tensor>,
    ) -> Result<Tensor> {
        let sizes = q.sizes()?;
        let (batch, tokens, dim) = (sizes[0], sizes[2], sizes[3]);
        let group = self.heads / self.kv_heads;
        let is_causal = mask.is_none() && tokens > 1;
        let scale = self.scale.unwrap_or(1.0);
        if group == 1 {
            return q.scaled_dot_product_attention(k, v, mask, (is_causal, scale, false));
        }
        if mask.is_none() && dim <= MAX_GROUPED_HEAD_DIM {
            return q.scaled_dot_product_attention(k, v, None, (is_causal, scale, true));
        }
        if tokens == 1 {
            // The query heads of one KV head become query rows.
            let rows = q.reshape(&[batch, self.kv_heads, group, dim])?;
            let attended = rows.scaled_dot_product_attention(k, v, mask, (false, scale, false))?;
            return attended.reshape(&[batch, self.heads, 1, dim]);
        }
        let (k, v) = (self.repeat_kv(k)?, self.repeat_kv(v)?);
        q.scaled_dot_product_attention(&k, &v, mask, (is_causal, scale, false))
    }

    /// `[B, kv_heads, S, head_dim]` → `[B, heads, S, head_dim]`.
    fn repeat_kv(&self, x: &Tensor) -> Result<Tensor> {
        let sizes = x.sizes()?;
        let (batch, keys, dim) = (sizes[0], sizes[2], sizes[3]);
        let group = self.heads / self.kv_heads;
        x.unsqueeze(2)?
            .expand(&[batch, self.kv_heads, group, keys, dim])?
            .reshape(&[batch, self.heads, keys, dim])
    }

    /// The same mathematics in plain products, for devices where the fused operation is a custom call.
    fn attend_written(
        &self,
        q: &Tensor,
        k: &Tensor,
        v: &Tensor,
        mask: Option<&Tensor>,
    ) -> Result<Tensor> {
        let sizes = q.sizes()?;
        let (batch, tokens, dim) = (sizes[0], sizes[2], sizes[3]);
        let keys = k.sizes()?[2];
        let group = self.heads / self.kv_heads;
        let grouped = [batch, self.kv_heads, group * tokens, dim];
        // Not rounded to the model's element type before the softmax, as little as in the fused operation. A TPU
        // multiplies bfloat16 into float32 anyway, and XLA converts nothing.
        let mut scores = q
            .reshape(&grouped)?
            .to_dtype(DType::F32)?
            .matmul(&k.to_dtype(DType::F32)?.transpose(2, 3)?)?;
        if let Some(scale) = self.scale {
            scores = scores.mul_scalar(scale)?;
        }
        if let Some(mask) = mask {
            let hidden = mask.logical_not()?; // [B, 1, T, S]
            scores = scores
                .reshape(&[batch, self.heads, tokens, keys])?
                .masked_fill(&hidden, MASKED)?
                .reshape(&[batch, self.kv_heads, group * tokens, keys])?;
        }
        let probs = scores.softmax_last_f32()?.to_dtype(q.dtype()?)?;
        probs.matmul(v)?.reshape(&[batch, self.heads, tokens, dim])
    }
}
