//! One step of the model over its cache: tokens in, logits or next ids out.
//!
//! On the chronological layout a prompt is one step, as in transformers. On the ring layout it is cut
//! into chunks of one size, the last one padded, so that every prompt runs the same shapes. The two
//! functions of the ring, [`Step::prefill`] and [`Step::decode`], take everything that changes from call
//! to call as tensors: they run eagerly, and `captured` runs them once to record them.

use crate::{
    aten::Tensor,
    cache::{Cache, Chronological, Keep, Ring, RingStep},
    checkpoint::Place,
    config::Config,
    error::{Error, Result},
    model::Gemma4,
    sampler::Sampler,
    weights::{Form, Sizes, Weights},
};

/// Shapes of the cache and of the steps on it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Shape {
    /// Sequences the cache holds.
    pub(crate) slots: usize,
    /// Positions of each.
    pub(crate) context: usize,
    /// Most tokens of one launch where shapes are static; `None` where they follow the text.
    pub(crate) chunk: Option<usize>,
}

/// A chunk of one slot's prompt, as tensors.
pub(crate) struct Chunk<'a> {
    /// `[1, T]`; what follows the first `count` is padding.
    pub(crate) ids: &'a Tensor,
    /// The slot, `[1]`; `None` when there is only one.
    pub(crate) slot: Option<&'a Tensor>,
    /// Position of the first token, `[1]`.
    pub(crate) start: &'a Tensor,
    /// Tokens that are no padding, `[1]`.
    pub(crate) count: &'a Tensor,
}

/// A model, its cache, and how tokens are chosen.
pub(crate) struct Step {
    model: Gemma4,
    cache: Cache,
    sampler: Sampler,
    shape: Shape,
    /// Names the device of inputs.
    like: Tensor,
    sizes: Sizes,
}

impl Step {
    /// Loads the checkpoint in `places`; `like` names device and element type.
    ///
    /// # Errors
    /// What the checkpoint gets wrong, naming file, key or tensor.
    pub(crate) fn load(
        config: &Config,
        places: &[Place],
        (shape, form): (Shape, Form),
        like: &Tensor,
        on_layer: &mut dyn FnMut(usize, usize) -> Result<()>,
    ) -> Result<Self> {
        let mut weights = Weights::open(places, like.alias()?, form)?.packed_by(&config.schemes);
        let model = Gemma4::load(config, &mut weights, like, on_layer)?;
        let Shape { slots, context, chunk } = shape;
        let cache = match chunk {
            None => Cache::Chronological(Chronological::new(config, slots, context, like)?),
            Some(chunk) => Cache::Ring(Ring::new(config, slots, (context, chunk), like)?),
        };
        let sampler =
            Sampler::new(&config.suppress_tokens, config.vocab_size, like, form.shapes_only)?;
        let sizes = weights.sizes();
        Ok(Self { model, cache, sampler, shape, like: like.alias()?, sizes })
    }

    /// Handles on all its tensors: parameters, then state.
    ///
    /// # Errors
    /// `Aten` when a handle cannot be made.
    pub(crate) fn tensors(&mut self) -> Result<(Vec<Tensor>, Vec<Tensor>)> {
        let alias = |all: Vec<&mut Tensor>| all.into_iter().map(|tensor| tensor.alias()).collect();
        let parameters: Result<_> = alias(self.parameters_mut());
        let state: Result<_> = alias(self.state_mut());
        Ok((parameters?, state?))
    }

    /// Every tensor a step reads and does not change, in a fixed order.
    pub(crate) fn parameters_mut(&mut self) -> Vec<&mut Tensor> {
        let mut all = self.model.tensors_mut();
        self.sampler.tensors_mut(&mut all);
        all
    }

    /// The cache's tensors, in a fixed order.
    pub(crate) fn state_mut(&mut self) -> Vec<&mut Tensor> {
        self.cache.tensors_mut()
    }

    /// Bytes of the weights.
    pub(crate) fn sizes(&self) -> &Sizes {
        &self.sizes
    }

    /// Bytes of the cache.
    pub(crate) fn cache_bytes(&self) -> u64 {
        self.cache.bytes()
    }

    /// The id with the largest of `logits` `[rows, vocab]` in each row, `[rows]` on the device.
    pub(crate) fn choose(&self, logits: &Tensor) -> Result<Tensor> {
        self.sampler.greedy(logits)
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
                let positions = positions.unsqueeze(0)?;
                self.model.forward((&ids, &positions), &plan, &keep, &mut self.cache)?
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
        let number = |n: usize| Tensor::from_i64(&[n as i64], &[1], &self.like);
        let slot = if self.shape.slots == 1 { None } else { Some(number(slot)?) };
        let mut inputs = Vec::new();
        for (index, part) in token_ids.chunks(chunk).enumerate() {
            let mut ids = part.to_vec();
            ids.resize(chunk, 0);
            let ids = Tensor::from_i64(&ids, &[1, chunk as i64], &self.like)?;
            inputs.push((ids, number(start + index * chunk)?, number(part.len())?, part.len()));
        }
        let mut all = Vec::new();
        for (ids, start, count, real) in &inputs {
            let chunk = Chunk { ids, slot: slot.as_ref(), start, count };
            let keep = if all_logits { None } else { Some(1) };
            let logits = self.prefill(&chunk, usize::MAX, keep)?;
            if all_logits {
                all.push(logits.narrow(1, 0, *real as i64)?);
            } else {
                all = vec![logits];
            }
        }
        Tensor::cat(&all.iter().collect::<Vec<_>>(), 1)
    }

    /// Logits of the last token of `chunk` that is no padding, `keep` times over, or of all tokens:
    /// `[1, kept, vocab]`. Full layers read their first `read` rows, which hold every position before the
    /// chunk.
    ///
    /// # Errors
    /// `Aten` when an operation fails.
    pub(crate) fn prefill(
        &mut self,
        chunk: &Chunk<'_>,
        read: usize,
        keep: Option<i64>,
    ) -> Result<Tensor> {
        let tokens = chunk.ids.sizes()?[1];
        let start = chunk.start.unsqueeze(1)?; // [1, 1]
        let positions = start.add(&Tensor::arange(0, tokens, &self.like)?)?; // [1, T]
        let before_last = chunk.count.add_scalar_i64(-1)?; // [1]
        let last = start.add(&before_last.unsqueeze(1)?)?;
        let step = RingStep { slots: chunk.slot, positions: &positions, last: &last, read };
        let plan = self.ring()?.plan(&step)?;
        let keep = match keep {
            None => Keep::All,
            Some(copies) => Keep::At(before_last.unsqueeze(1)?.expand(&[1, copies])?),
        };
        self.model.forward((chunk.ids, &positions), &plan, &keep, &mut self.cache)
    }

    /// One token of every slot: `ids` and `positions` `[slots]`; logits `[slots, 1, vocab]`. Full layers read
    /// their first `read` rows, which hold every position up to the step's own.
    ///
    /// # Errors
    /// `Aten` when an operation fails.
    pub(crate) fn decode(
        &mut self,
        ids: &Tensor,
        positions: &Tensor,
        read: usize,
    ) -> Result<Tensor> {
        let positions = positions.unsqueeze(1)?; // [B, 1]
        let step = RingStep { slots: None, positions: &positions, last: &positions, read };
        let plan = self.ring()?.plan(&step)?;
        let ids = ids.unsqueeze(1)?;
        self.model.forward((&ids, &positions), &plan, &Keep::All, &mut self.cache)
    }

    fn ring(&self) -> Result<&Ring> {
        match &self.cache {
            Cache::Ring(ring) => Ok(ring),
            Cache::Chronological(_) => {
                Err(Error::Internal("static shapes are for the ring layout".into()))
            }
        }
    }
}
