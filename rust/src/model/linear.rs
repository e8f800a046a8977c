//! A projection of the model, in the form its device multiplies fastest.

use crate::{
    aten::{DType, Tensor},
    error::Result,
    weights::{Arithmetic, Weights},
};

/// A matrix without bias.
pub(crate) struct Linear {
    /// `[out, in]` as in the checkpoint; for [`Arithmetic::Compiled`] one or more `[in, part of out]`.
    parts: Vec<Tensor>,
    /// One factor for each output where the weight is int8, `[out]`.
    scale: Option<Tensor>,
    arithmetic: Arithmetic,
}

impl Linear {
    /// The tensor `name` of shape `[out, in]`.
    pub(crate) fn load(weights: &mut Weights, name: &str, shape: [usize; 2]) -> Result<Self> {
        let (parts, scale) = weights.take_matrix(name, shape)?;
        Ok(Self { parts, scale, arithmetic: weights.arithmetic() })
    }

    /// `[…, in]` → `[…, out]`.
    pub(crate) fn forward(&self, x: &Tensor) -> Result<Tensor> {
        match self.arithmetic {
            Arithmetic::Exact => x.linear(&self.parts[0]),
            Arithmetic::Compiled => compiled(&self.parts, self.scale.as_ref(), x),
        }
    }

    pub(crate) fn tensors_mut<'a>(&'a mut self, all: &mut Vec<&'a mut Tensor>) {
        all.extend(&mut self.parts);
        all.extend(&mut self.scale);
    }
}

fn compiled(parts: &[Tensor], scale: Option<&Tensor>, x: &Tensor) -> Result<Tensor> {
    let parts: Vec<_> = parts
        .iter()
        .map(|weight| x.matmul(&weight.to_dtype(x.dtype()?)?))
        .collect::<Result<_>>()?;
    let y = match &parts[..] {
        [one] => one.alias()?,
        several => Tensor::cat(&several.iter().collect::<Vec<_>>(), -1)?,
    };
    let y = match scale {
        None => y,
        Some(scale) => y.to_dtype(DType::F32)?.mul(scale)?.to_dtype(x.dtype()?)?,
    };
    // Kept apart from the norm that follows: XLA would fold its sum of squares into the product and
    // read the weights without prefetching them (docs/log.md).
    y.optimization_barrier()
}
