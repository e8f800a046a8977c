//! Rotary position embedding: tables in float32, rotation in the model's element type (gemma4.md 2.4).

use crate::{
    aten::{DType, Tensor},
    cache::Keep,
    config::Rope,
    error::Result,
};

/// Frequencies of one layer type.
pub(crate) struct RotaryEmbedding {
    inv_freq: Tensor, // [head_dim / 2], float32
}

/// Cosines and sines of one step's positions, ready to broadcast over heads.
pub(crate) struct Rotation {
    pub(crate) cos: Tensor, // [B, T, 1, head_dim]
    pub(crate) sin: Tensor,
}

impl RotaryEmbedding {
    /// The exponent's denominator is the whole head, also where only part of it turns.
    pub(crate) fn new(rope: &Rope, head_dim: usize, like: &Tensor) -> Result<Self> {
        let (half, rotated) = (head_dim / 2, rope.rotated);
        // Made by ATen, like everything a step needs: it can be a fake tensor then, and a power computed in
        // Rust can differ in the last bit.
        let mut inv_freq = Tensor::arange(0, rotated as i64, like)?
            .to_dtype(DType::F32)?
            .mul_scalar(2.0)?
            .div_scalar(head_dim as f64)?
            .scalar_pow(rope.rope_theta)?
            .reciprocal()?;
        if rotated < half {
            let still = Tensor::zeros(&[(half - rotated) as i64], DType::F32, like)?;
            inv_freq = Tensor::cat(&[&inv_freq, &still], 0)?;
        }
        Ok(Self { inv_freq: inv_freq.div_scalar(rope.factor)? })
    }

    pub(crate) fn tensors_mut<'a>(&'a mut self, all: &mut Vec<&'a mut Tensor>) {
        all.push(&mut self.inv_freq);
    }

    /// The tables for `positions` `[B, T]`, in `dtype`.
    pub(crate) fn at(&self, positions: &Tensor, dtype: DType) -> Result<Rotation> {
        let angles = positions.unsqueeze(-1)?.to_dtype(DType::F32)?.mul(&self.inv_freq)?;
        let angles = Tensor::cat(&[&angles, &angles], -1)?.unsqueeze(2)?; // [B, T, 1, head_dim]
        Ok(Rotation { cos: angles.cos()?.to_dtype(dtype)?, sin: angles.sin()?.to_dtype(dtype)? })
    }
}

impl Rotation {
    /// Turns `x` `[B, T, heads, head_dim]`; pairs are `(j, j + head_dim / 2)`.
    pub(crate) fn rotate(&self, x: &Tensor, head_dim: usize) -> Result<Tensor> {
        let half = head_dim as i64 / 2;
        let turned =
            Tensor::cat(&[&x.narrow(-1, half, half)?.neg()?, &x.narrow(-1, 0, half)?], -1)?;
        x.mul(&self.cos)?.add(&turned.mul(&self.sin)?)
    }

    /// The same tables for only those of the `T` tokens that `keep` names.
    pub(crate) fn keep(&self, keep: &Keep) -> Result<Self> {
        Ok(Self { cos: keep.of(&self.cos, 1)?, sin: keep.of(&self.sin, 1)? })
    }
}
