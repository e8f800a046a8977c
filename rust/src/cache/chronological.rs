//! The exact layout: rows stand in the order of their positions, and attention gets views of them.
//!
//! A sliding layer has a buffer of two windows that fills from the front. When it is full, the last
//! `window - 1` rows, all that a later query can see, move to the front: one copied row a token on
//! average, and never a gather.

use super::{Attend, Buffers, Rows, StepPlan, TypePlan, types_of};
use crate::{
    aten::{DType, Tensor},
    config::{Config, LayerType},
    error::Result,
};

/// Where a step's T new rows go, and which rows its queries see.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Placement {
    /// New rows go to `at`; seen are the `keep` rows before it and the new ones.
    Append {
        /// First new row.
        at: usize,
        /// Old rows in view.
        keep: usize,
        /// New rows.
        tokens: usize,
    },
    /// The `keep` rows from `from` and the new ones are joined, which is what is seen; the last `store`
    /// of them become the front of the buffer.
    Join {
        /// First old row in view.
        from: usize,
        /// Old rows in view.
        keep: usize,
        /// Rows that go to the front.
        store: usize,
    },
}

/// Filled rows of one slot in the buffers of one layer type. Pure arithmetic.
#[derive(Clone, Copy, Debug)]
struct RowIndex {
    /// Rows a buffer has.
    rows: usize,
    /// Old rows that a new query can see at most: `window - 1`, or all.
    reach: usize,
    /// Rows filled.
    end: usize,
}

impl RowIndex {
    fn new(rows: usize, reach: usize) -> Self {
        Self { rows, reach, end: 0 }
    }

    /// Makes room for `tokens` rows after those placed so far.
    fn place(&mut self, tokens: usize) -> Placement {
        let keep = self.end.min(self.reach);
        if self.end + tokens <= self.rows {
            let at = self.end;
            self.end += tokens;
            return Placement::Append { at, keep, tokens };
        }
        let from = self.end - keep;
        let store = (keep + tokens).min(self.reach);
        self.end = store;
        Placement::Join { from, keep, store }
    }
}

/// The cache of exact mode. A step runs one slot; positions of a slot are consecutive from 0.
pub(crate) struct Chronological {
    pub(super) buffers: Buffers,
    window: usize,
    types: [bool; 2],
    empty: [RowIndex; 2],
    slots: Vec<Slot>,
    like: Tensor,
}

#[derive(Clone, Copy)]
struct Slot {
    /// Positions stored so far; the next token's position.
    position: usize,
    rows: [RowIndex; 2],
}

impl Chronological {
    /// Room for `slots` sequences of `context` positions each.
    pub(crate) fn new(
        config: &Config,
        slots: usize,
        context: usize,
        like: &Tensor,
    ) -> Result<Self> {
        let window = config.sliding_window;
        let rows = [(2 * window).min(context), context];
        let empty = [RowIndex::new(rows[0], window - 1), RowIndex::new(rows[1], context)];
        Ok(Self {
            buffers: Buffers::new(config, slots, rows, like)?,
            window,
            types: types_of(config),
            empty,
            slots: vec![Slot { position: 0, rows: empty }; slots],
            like: like.alias()?,
        })
    }

    /// Forgets what `slot` holds; the next step of it begins at position 0.
    pub(crate) fn clear(&mut self, slot: usize) {
        self.slots[slot] = Slot { position: 0, rows: self.empty };
    }

    /// The plan for the next `tokens` tokens of `slot`, whose rows count as stored from now on.
    pub(crate) fn plan(&mut self, slot: usize, tokens: usize) -> Result<StepPlan> {
        let start = self.slots[slot].position;
        let mut types = [None, None];
        for layer_type in LayerType::ALL {
            let index = layer_type.index();
            if !self.types[index] {
                continue;
            }
            let placement = self.slots[slot].rows[index].place(tokens);
            types[index] = Some(TypePlan {
                attend: Attend::Fused,
                mask: self.mask(layer_type, start, tokens)?,
                rows: Rows::Chronological { slot: slot as i64, placement },
            });
        }
        self.slots[slot].position += tokens;
        Ok(StepPlan { types })
    }

    /// transformers passes no mask where plain causal attention says the same, except on sliding layers
    /// that already see a whole window (gemma4.md section 10).
    fn mask(&self, layer_type: LayerType, start: usize, tokens: usize) -> Result<Option<Tensor>> {
        let sliding = layer_type == LayerType::Sliding;
        let old = if sliding { start.min(self.window - 1) } else { start };
        let seen = old + tokens;
        if (tokens == 1 || seen == tokens) && !(sliding && seen >= self.window) {
            return Ok(None);
        }
        if tokens == 1 {
            return Tensor::ones(&[1, 1, 1, seen as i64], DType::Bool, &self.like).map(Some);
        }
        let (start, end) = (start as i64, (start + tokens) as i64);
        let query = Tensor::arange(start, end, &self.like)?.unsqueeze(1)?; // [T, 1]
        let key = Tensor::arange(end - seen as i64, end, &self.like)?; // [S]
        let mut mask = key.le(&query)?;
        if sliding {
            let oldest = query.add_scalar(-(self.window as f64))?;
            mask = mask.logical_and(&key.gt(&oldest)?)?;
        }
        Ok(Some(mask.unsqueeze(0)?.unsqueeze(0)?))
    }

    /// See [`super::Cache::update`]; B is 1.
    pub(super) fn update(
        &self,
        layer_idx: usize,
        (k, v): (&Tensor, &Tensor),
        slot: i64,
        placement: &Placement,
    ) -> Result<(Tensor, Tensor)> {
        let (keys, values) = self.buffers.of(layer_idx)?;
        let one = |buffer: &Tensor, new: &Tensor| {
            let buffer = buffer.narrow(0, slot, 1)?; // [1, kv_heads, rows, head_dim]
            match *placement {
                Placement::Append { at, keep, tokens } => {
                    buffer.narrow(2, at as i64, tokens as i64)?.copy_(new)?;
                    buffer.narrow(2, (at - keep) as i64, (keep + tokens) as i64)
                }
                Placement::Join { from, keep, store } => {
                    let old = buffer.narrow(2, from as i64, keep as i64)?;
                    let all = Tensor::cat(&[&old, new], 2)?;
                    let last = all.sizes()?[2] - store as i64;
                    let stored = all.narrow(2, last, store as i64)?;
                    buffer.narrow(2, 0, store as i64)?.copy_(&stored)?;
                    Ok(all)
                }
            }
        };
        Ok((one(keys, k)?, one(values, v)?))
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// Positions in a plain vector of rows, moved as the placement says.
    fn apply(buffer: &mut [usize], placement: Placement, new: &[usize]) -> Vec<usize> {
        match placement {
            Placement::Append { at, keep, tokens } => {
                buffer[at..at + tokens].copy_from_slice(new);
                buffer[at - keep..at + tokens].to_vec()
            }
            Placement::Join { from, keep, store } => {
                let mut all = buffer[from..from + keep].to_vec();
                all.extend(new);
                buffer[..store].copy_from_slice(&all[all.len() - store..]);
                all
            }
        }
    }

    proptest! {
        #[test]
        fn a_step_sees_the_last_window_of_old_positions_and_its_own(
            window in 1_usize..9,
            chunks in prop::collection::vec(1_usize..25, 1..40),
        ) {
            let mut index = RowIndex::new(2 * window, window - 1);
            let mut buffer = vec![usize::MAX; 2 * window];
            let mut position = 0;
            for tokens in chunks {
                let new: Vec<_> = (position..position + tokens).collect();
                let seen = apply(&mut buffer, index.place(tokens), &new);
                let oldest = position.saturating_sub(window - 1);
                prop_assert_eq!(seen, (oldest..position + tokens).collect::<Vec<_>>());
                position += tokens;
            }
        }

        #[test]
        fn a_full_layer_sees_every_position_in_order(
            chunks in prop::collection::vec(1_usize..25, 1..20),
        ) {
            let context = chunks.iter().sum();
            let mut index = RowIndex::new(context, context);
            let mut buffer = vec![usize::MAX; context];
            let mut position = 0;
            for tokens in chunks {
                let new: Vec<_> = (position..position + tokens).collect();
                let seen = apply(&mut buffer, index.place(tokens), &new);
                position += tokens;
                prop_assert_eq!(seen, (0..position).collect::<Vec<_>>());
            }
        }
    }

    #[test]
    fn decoding_moves_rows_once_a_window() {
        let mut index = RowIndex::new(16, 7);
        let joins = (0..800).filter(|_| matches!(index.place(1), Placement::Join { .. })).count();
        assert_eq!(joins, (800 - 16) / 10 + 1);
    }
}
