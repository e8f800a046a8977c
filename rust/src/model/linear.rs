//! A projection of the model, in the form its device multiplies fastest.

use std::sync::Arc;

use crate::{
    aten::{DType, Tensor},
    error::Result,
    kernels::{Kernels, W4Matrix},
    weights::{Arithmetic, Weights},
};

/// A matrix without bias.
pub(crate) struct Linear {
    weight: Weight,
    arithmetic: Arithmetic,
}

enum Weight {
    /// `[out, in]` as in the checkpoint; for [`Arithmetic::Compiled`] one or more `[in, part of out]`.
    Dense {
        parts: Vec<Tensor>,
        /// One factor for each output where the weight is int8, `[out]`.
        scale: Option<Tensor>,
    },
    /// As it is stored, for [`Arithmetic::Fast`].
    FourBits(W4Matrix, Arc<Kernels>),
}

impl Linear {
    /// The tensor `name` of shape `[out, in]`.
    pub(crate) fn load(weights: &mut Weights, name: &str, shape: [usize; 2]) -> Result<Self> {
        let arithmetic = weights.arithmetic();
        let weight = match weights.take_four_bits(name, shape)? {
            Some((matrix, kernels)) => Weight::FourBits(matrix, kernels),
            None => {
                let (parts, scale) = weights.take_matrix(name, shape)?;
                Weight::Dense { parts, scale }
            }
        };
        Ok(Self { weight, arithmetic })
    }

    /// `[…, in]` → `[…, out]`.
    pub(crate) fn forward(&self, x: &Tensor) -> Result<Tensor> {
        match &self.weight {
            Weight::FourBits(matrix, kernels) => four_bits(matrix, kernels, x),
            Weight::Dense { parts, scale } if self.arithmetic == Arithmetic::Compiled => {
                compiled(parts, scale.as_ref(), x)
            }
            Weight::Dense { parts, .. } => x.linear(&parts[0]),
        }
    }

    pub(crate) fn tensors_mut<'a>(&'a mut self, all: &mut Vec<&'a mut Tensor>) {
        if let Weight::Dense { parts, scale } = &mut self.weight {
            all.extend(parts);
            all.extend(scale);
        }
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

fn four_bits(matrix: &W4Matrix, kernels: &Kernels, x: &Tensor) -> Result<Tensor> {
    let mut shape = x.sizes()?;
    if let Some(width) = shape.last_mut() {
        *width = matrix.rows() as i64;
    }
    let mut done = Ok(());
    let y = x.contiguous()?.with_bf16(|values| {
        Tensor::filled_bf16(&shape, x, |out| {
            done = matrix.multiply(values, out, (kernels.set, &kernels.pool));
        })
    })??;
    done.map(|()| y)
}
