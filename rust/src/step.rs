//! How a step of the model is executed: tokens of one slot in, logits out.
//!
//! On the chronological layout a prompt is one step, as in transformers. On the ring layout it is cut
//! into chunks of one size, the last one padded, so that every prompt runs the same shapes.

use crate::{
    aten::Tensor,
    cache::{Cache, Chronological, Keep, Ring, RingStep},
    config::Config,
    error::Result,
    model::Gemma4,
};

/// Shapes of the cache and of the steps on it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Shape {
    /// Sequences the cache holds.
    pub(crate) slots: usize,
    /// Positions of each.
    pub(crate) context: usize,
    /// Tokens of one prefill step where shapes are static; `None` where they follow the text.
    pub(crate) chunk: Option<usize>,
}

/// A model with its cache.
pub(crate) struct Runner {
    model: Gemma4,
    cache: Cache,
    shape: Shape,
    /// Names the device of inputs.
    like: Tensor,
}

impl Runner {
    pub(crate) fn new(model: Gemma4, config: &Config, shape: Shape, like: &Tensor) -> Result<Self> {
        let cache = match shape.chunk {
            None => {
                Cache::Chronological(Chronological::new(config, shape.slots, shape.context, like)?)
            }
            Some(chunk) => {
                Cache::Ring(Ring::new(config, shape.slots, (shape.context, chunk), like)?)
            }
        };
        Ok(Self { model, cache, shape, like: like.alias()? })
    }

    /// Bytes of the cache.
    pub(crate) fn cache_bytes(&self) -> u64 {
        self.cache.bytes()
    }

    /// Runs `token_ids` of `slot` from position `start` on; logits `[kept, vocab]` of the last token, or
    /// of all of them. A slot begins anew at position 0.
    ///
    /// # Errors
    /// `Aten` when an operation fails; the slot must then begin anew.
    pub(crate) fn run(
        &mut self,
        slot: usize,
        token_ids: &[i64],
        start: usize,
        all_logits: bool,
    ) -> Result<Tensor> {
        let logits = match &mut self.cache {
            Cache::Chronological(cache) => {
                if start == 0 {
                    cache.clear(slot);
                }
                let shape = [1, token_ids.len() as i64];
                let ids = Tensor::from_i64(token_ids, &shape, &self.like)?;
                let positions = Tensor::arange(start as i64, start as i64 + shape[1], &self.like)?;
                let plan = cache.plan(slot, token_ids.len())?;
                let keep = if all_logits { Keep::All } else { Keep::Last };
                self.model.forward((&ids, &positions.unsqueeze(0)?), &plan, &keep, &self.cache)?
            }
            Cache::Ring(_) => self.run_in_chunks(slot, token_ids, start, all_logits)?,
        };
        let vocab = logits.sizes()?[2];
        logits.reshape(&[-1, vocab])
    }

    fn run_in_chunks(
        &mut self,
        slot: usize,
        token_ids: &[i64],
        start: usize,
        all_logits: bool,
    ) -> Result<Tensor> {
        // One token is a decode step, whose shape needs no padding.
        let chunk = if token_ids.len() == 1 { 1 } else { self.shape.chunk.unwrap_or(1) };
        let mut all = Vec::new();
        for (index, part) in token_ids.chunks(chunk).enumerate() {
            let logits = self.run_chunk(slot, part, (start + index * chunk, chunk), all_logits)?;
            if !all_logits {
                all.clear();
            }
            all.push(logits);
        }
        Tensor::cat(&all.iter().collect::<Vec<_>>(), 1)
    }

    /// `part` holds the first of `chunk` tokens; the others are padding.
    fn run_chunk(
        &self,
        slot: usize,
        part: &[i64],
        (start, chunk): (usize, usize),
        all_logits: bool,
    ) -> Result<Tensor> {
        let Cache::Ring(cache) = &self.cache else {
            return Err(crate::error::Error::Internal("chunks are for the ring layout".into()));
        };
        let (start, tokens) = (start as i64, part.len() as i64);
        let mut ids = part.to_vec();
        ids.resize(chunk, 0);
        let ids = Tensor::from_i64(&ids, &[1, chunk as i64], &self.like)?;
        let positions: Vec<i64> = (start..start + chunk as i64).collect();
        let positions = Tensor::from_i64(&positions, &[1, chunk as i64], &self.like)?;
        let last = Tensor::from_i64(&[start + tokens - 1], &[1, 1], &self.like)?;
        let step = RingStep { slots: (slot as i64, 1), positions: &positions, last: &last };
        let plan = cache.plan(&step)?;
        let keep = if all_logits {
            Keep::All
        } else {
            Keep::At(Tensor::from_i64(&[tokens - 1], &[1], &self.like)?)
        };
        let logits = self.model.forward((&ids, &positions), &plan, &keep, &self.cache)?;
        if all_logits { logits.narrow(1, 0, tokens) } else { Ok(logits) }
    }
}
