//! The gated MLP (gemma4.md 2.5): `down(gelu(gate(x)) · up(x))`.

use super::linear::Linear;
use crate::{aten::Tensor, error::Result, weights::Weights};

/// gate, up and down projections of one layer.
pub(crate) struct Mlp {
    gate_proj: Linear, // [intermediate, hidden]
    up_proj: Linear,   // [intermediate, hidden]
    down_proj: Linear, // [hidden, intermediate]
}

impl Mlp {
    /// `prefix` ends in `mlp.`.
    pub(crate) fn load(
        prefix: &str,
        hidden: usize,
        intermediate: usize,
        weights: &mut Weights,
    ) -> Result<Self> {
        let mut take = |name: &str, shape: [usize; 2]| {
            Linear::load(weights, &format!("{prefix}{name}.weight"), shape)
        };
        Ok(Self {
            gate_proj: take("gate_proj", [intermediate, hidden])?,
            up_proj: take("up_proj", [intermediate, hidden])?,
            down_proj: take("down_proj", [hidden, intermediate])?,
        })
    }

    /// `[B, T, hidden]` → `[B, T, hidden]`.
    pub(crate) fn forward(&self, x: &Tensor) -> Result<Tensor> {
        let gate = self.gate_proj.forward(x)?.gelu_tanh()?;
        self.down_proj.forward(&gate.mul(&self.up_proj.forward(x)?)?)
    }

    pub(crate) fn tensors_mut<'a>(&'a mut self, all: &mut Vec<&'a mut Tensor>) {
        for linear in [&mut self.gate_proj, &mut self.up_proj, &mut self.down_proj] {
            linear.tensors_mut(all);
        }
    }
}
