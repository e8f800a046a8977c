//! RMS norm: in float32, the weight as it is (not 1 + w), one rounding at the end (gemma4.md 2.1).

use crate::{
    aten::{DType, Tensor},
    error::Result,
};

/// Normalizes the last dimension.
pub(crate) struct RmsNorm {
    /// float32, whatever the model runs in; converted once instead of at every call.
    weight: Option<Tensor>,
    eps: f64,
}

impl RmsNorm {
    /// `weight` has the width of the last dimension.
    pub(crate) fn new(weight: &Tensor, eps: f64) -> Result<Self> {
        Ok(Self { weight: Some(weight.to_dtype(DType::F32)?), eps })
    }

    /// The norm of values (`v_norm`), which has no weight.
    pub(crate) fn without_weight(eps: f64) -> Self {
        Self { weight: None, eps }
    }

    /// Same shape and element type as `x`.
    pub(crate) fn forward(&self, x: &Tensor) -> Result<Tensor> {
        let f = x.to_dtype(DType::F32)?;
        let mean_square = f.pow_scalar(2.0)?.mean_last()?.add_scalar(self.eps)?;
        // transformers takes a power, not rsqrt, and multiplies: both decide the last bit.
        let mut y = f.mul(&mean_square.pow_scalar(-0.5)?)?;
        if let Some(weight) = &self.weight {
            y = y.mul(weight)?;
        }
        y.to_dtype(x.dtype()?)
    }
}
