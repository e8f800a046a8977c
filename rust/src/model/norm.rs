//! RMS norm: in float32, one rounding at the end (gemma4.md 2.1); the weight as it is, or in Gemma 3 1 + w.

use crate::{
    aten::{DType, Tensor},
    config::{Config, NormForm},
    error::Result,
    weights::{Arithmetic, Weights},
};

/// Lanes of a TPU's vector register.
const LANES: i64 = 128;

/// Normalizes the last dimension.
pub(crate) struct RmsNorm {
    /// What multiplies, 1 + w included. float32, whatever the model runs in; made once instead of at every call.
    weight: Option<Tensor>,
    form: NormForm,
    eps: f64,
    arithmetic: Arithmetic,
}

impl RmsNorm {
    /// The tensor `name`, of the width of the last dimension.
    pub(crate) fn load(
        weights: &mut Weights,
        name: &str,
        width: usize,
        config: &Config,
    ) -> Result<Self> {
        let weight = weights.take(name, &[width])?.to_dtype(DType::F32)?;
        let weight = match config.traits.norm_form {
            NormForm::OnePlus => weight.add_scalar(1.0)?,
            NormForm::Plain => weight,
        };
        Ok(Self { weight: Some(weight), ..Self::without_weight(weights.arithmetic(), config) })
    }

    /// A norm that has no weight, like that of values (`v_norm`).
    pub(crate) fn without_weight(arithmetic: Arithmetic, config: &Config) -> Self {
        let form = config.traits.norm_form;
        Self { weight: None, form, eps: config.rms_norm_eps, arithmetic }
    }

    pub(crate) fn tensors_mut<'a>(&'a mut self, all: &mut Vec<&'a mut Tensor>) {
        all.extend(&mut self.weight);
    }

    /// Same shape and element type as `x`.
    pub(crate) fn forward(&self, x: &Tensor) -> Result<Tensor> {
        let sizes = x.sizes()?;
        let f = x.to_dtype(DType::F32)?;
        let mut y = match (self.arithmetic, sizes.last()) {
            (Arithmetic::Exact, _) => {
                let mean_square = f.pow_scalar(2.0)?.mean_last()?.add_scalar(self.eps)?;
                // The operation that transformers takes, and that it multiplies: both decide the last bit.
                f.mul(&match self.form {
                    NormForm::OnePlus => mean_square.rsqrt()?,
                    NormForm::Plain => mean_square.pow_scalar(-0.5)?,
                })?
            }
            (Arithmetic::Compiled, Some(width)) if width % LANES == 0 => {
                self.in_lanes(&f, &sizes)?
            }
            (Arithmetic::Compiled, _) => {
                let mean_square = f.mul(&f)?.mean_last()?.add_scalar(self.eps)?;
                f.mul(&mean_square.rsqrt()?)?
            }
        };
        if let Some(weight) = &self.weight {
            y = y.mul(weight)?;
        }
        y.to_dtype(x.dtype()?)
    }

    /// The mean of squares as a product with ones, which leaves it in every lane of a TPU's vector register. XLA
    /// makes two programs of a sum and what is done with it, two hundred times a step, but fuses this with
    /// both its neighbours (docs/log.md: 0.5 ms of 3.4). On a TPU squares are rounded to bfloat16 before they are
    /// summed, which changes a mean over hundreds of them by less than bfloat16 can show.
    fn in_lanes(&self, f: &Tensor, sizes: &[i64]) -> Result<Tensor> {
        let (outer, width) = sizes.split_at(sizes.len() - 1);
        let ones = Tensor::ones(&[width[0], LANES], DType::F32, f)?;
        let mean_square = f.mul(f)?.matmul(&ones)?.mul_scalar(1.0 / width[0] as f64)?;
        let factor = mean_square.add_scalar(self.eps)?.rsqrt()?.unsqueeze(-2)?; // [.., 1, LANES]
        f.reshape(&[outer, &[width[0] / LANES, LANES]].concat())?.mul(&factor)?.reshape(sizes)
    }
}
