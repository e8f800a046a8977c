//! The gated MLP (gemma4.md 2.5): `down(gelu(gate(x)) · up(x))`.

use crate::{aten::Tensor, error::Result, weights::Weights};

/// gate, up and down projections of one layer.
pub(crate) struct Mlp {
    gate_proj: Tensor, // [intermediate, hidden]
    up_proj: Tensor,   // [intermediate, hidden]
    down_proj: Tensor, // [hidden, intermediate]
}

impl Mlp {
    /// `prefix` ends in `mlp.`.
    pub(crate) fn load(
        prefix: &str,
        hidden: usize,
        intermediate: usize,
        weights: &mut Weights,
    ) -> Result<Self> {
        let mut take =
            |name: &str, shape: [usize; 2]| weights.take(&format!("{prefix}{name}.weight"), &shape);
        Ok(Self {
            gate_proj: take("gate_proj", [intermediate, hidden])?,
            up_proj: take("up_proj", [intermediate, hidden])?,
            down_proj: take("down_proj", [hidden, intermediate])?,
        })
    }

    /// `[B, T, hidden]` → `[B, T, hidden]`.
    pub(crate) fn forward(&self, x: &Tensor) -> Result<Tensor> {
        let gate = x.linear(&self.gate_proj)?.gelu_tanh()?;
        gate.mul(&x.linear(&self.up_proj)?)?.linear(&self.down_proj)
    }
}
