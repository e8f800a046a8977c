//! Rotary position embedding (gemma4.md 2.4): angles in float32, their cosines and sines rounded as in transformers.

use half::bf16;

use crate::config::Rope;

/// Frequencies of one layer type, `[head_dim / 2]`.
pub(super) struct RotaryEmbedding {
    inv_freq: Vec<f32>,
}

/// Cosines and sines of a step's positions, each `[tokens, head_dim / 2]`.
pub(super) struct Rotation {
    cos: Vec<f32>,
    sin: Vec<f32>,
    half: usize,
}

impl RotaryEmbedding {
    /// The exponent's denominator is the whole head, also where only part of it turns.
    pub(super) fn new(rope: &Rope, head_dim: usize) -> Self {
        let frequency = |i: usize| {
            if i >= rope.rotated {
                return 0.0;
            }
            let exponent = (2 * i) as f32 / head_dim as f32;
            (1.0 / rope.rope_theta.powf(f64::from(exponent)) as f32) / rope.factor as f32
        };
        Self { inv_freq: (0..head_dim / 2).map(frequency).collect() }
    }

    /// For `tokens` positions from `start` on.
    pub(super) fn at(&self, start: usize, tokens: usize) -> Rotation {
        let half = self.inv_freq.len();
        let angles = (start..start + tokens)
            .flat_map(|position| self.inv_freq.iter().map(move |freq| position as f32 * freq));
        let (sin, cos) = angles
            .map(|angle| {
                let (sin, cos) = f64::from(angle).sin_cos();
                (bf16::from_f64(sin).to_f32(), bf16::from_f64(cos).to_f32())
            })
            .unzip();
        Rotation { cos, sin, half }
    }
}

impl Rotation {
    /// Cosines and sines of one token.
    pub(super) fn of(&self, token: usize) -> (&[f32], &[f32]) {
        let range = token * self.half..(token + 1) * self.half;
        (&self.cos[range.clone()], &self.sin[range])
    }
}
