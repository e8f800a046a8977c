//! RMS norm: in float32, the weight as it is (not 1 + w), one rounding at the end (gemma4.md 2.1).

use crate::{
    aten::{DType, Tensor},
    error::Result,
    weights::{Arithmetic, Weights},
};

/// Normalizes the last dimension.
pub(crate) struct RmsNorm {
    /// float32, whatever the model runs in; converted once instead of at every call.
    weight: Option<Tensor>,
    eps: f64,
    arithmetic: Arithmetic,
}

impl RmsNorm {
    /// The tensor `name`, of the width of the last dimension.
    pub(crate) fn load(weights: &mut Weights, name: &str, width: usize, eps: f64) -> Result<Self> {
        let weight = weights.take(name, &[width])?.to_dtype(DType::F32)?;
        Ok(Self { weight: Some(weight), eps, arithmetic: weights.arithmetic() })
    }

    /// The norm of values (`v_norm`), which has no weight.
    pub(crate) fn without_weight(arithmetic: Arithmetic, eps: f64) -> Self {
        Self { weight: None, eps, arithmetic }
    }

    pub(crate) fn tensors_mut<'a>(&'a mut self, all: &mut Vec<&'a mut Tensor>) {
        all.extend(&mut self.weight);
    }

    /// Same shape and element type as `x`.
    pub(crate) fn forward(&self, x: &Tensor) -> Result<Tensor> {
        let f = x.to_dtype(DType::F32)?;
        let mean_square = f.pow_scalar(2.0)?.mean_last()?.add_scalar(self.eps)?;
        // transformers takes a power, not rsqrt, and multiplies: both decide the last bit.
        let mut y = f.mul(&match self.arithmetic {
            Arithmetic::Exact => mean_square.pow_scalar(-0.5)?,
            Arithmetic::Compiled => mean_square.rsqrt()?,
        })?;
        if let Some(weight) = &self.weight {
            y = y.mul(weight)?;
        }
        y.to_dtype(x.dtype()?)
    }
}
