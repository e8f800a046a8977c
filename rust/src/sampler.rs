//! Choosing the next token from logits.

use crate::{
    aten::{DType, Tensor},
    error::Result,
};

/// Greedy choice, with the ids that the checkpoint forbids.
pub(crate) struct Sampler {
    /// True at forbidden ids, `[1, vocab]`.
    suppressed: Option<Tensor>,
}

impl Sampler {
    /// `suppress_tokens` come from `generation_config.json` and are below `vocab_size`.
    pub(crate) fn new(
        suppress_tokens: &[i64],
        vocab_size: usize,
        like: &Tensor,
        shapes_only: bool,
    ) -> Result<Self> {
        if suppress_tokens.is_empty() {
            return Ok(Self { suppressed: None });
        }
        let shape = [1, vocab_size as i64];
        if shapes_only {
            return Ok(Self { suppressed: Some(Tensor::zeros(&shape, DType::Bool, like)?) });
        }
        let mut flags = vec![0; vocab_size];
        for &id in suppress_tokens {
            flags[id as usize] = 1;
        }
        let flags = Tensor::from_i64(&flags, &shape, like)?;
        Ok(Self { suppressed: Some(flags.to_dtype(DType::Bool)?) })
    }

    pub(crate) fn tensors_mut<'a>(&'a mut self, all: &mut Vec<&'a mut Tensor>) {
        all.extend(&mut self.suppressed);
    }

    /// The index of the largest of `logits` `[rows, vocab]` in each row, `[rows]` on the device; the
    /// lowest such index when several tie.
    pub(crate) fn greedy(&self, logits: &Tensor) -> Result<Tensor> {
        // float32 first, as `generate` does: it changes no order, and ATen's float32 argmax is four
        // times as fast as its bfloat16 one over a vocabulary of 262,144.
        let mut scores = logits.to_dtype(DType::F32)?;
        if let Some(suppressed) = &self.suppressed {
            scores = scores.masked_fill(suppressed, f64::NEG_INFINITY)?;
        }
        scores.argmax_last()
    }
}
