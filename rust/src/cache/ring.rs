//! The layout with static shapes: the entry for position `p` stands in row `p mod rows`.
//!
//! Rows are written before attention reads them, and a mask made from positions says which are seen, so
//! no shape depends on how far a sequence is. A sliding layer has `window - 1 + chunk` rows: the T ≤
//! `chunk` rows a step writes then never replace one that the same step still has to see. Full layers
//! have `context + chunk` rows, so that the padding after a prompt's last token has room too.
//!
//! Padding costs nothing but its computation: a padded token's row counts as the older position it
//! replaced, which is out of every window, until a real token is written there. For the same reason a
//! slot needs no clearing.

use std::rc::Rc;

use super::{Attend, Buffers, Rows, StepPlan, TypePlan, types_of};
use crate::{
    aten::Tensor,
    config::{Config, LayerType},
    error::Result,
};

/// The cache of devices that compile.
pub(crate) struct Ring {
    pub(super) buffers: Buffers,
    window: usize,
    rows: [usize; 2],
    types: [bool; 2],
    like: Tensor,
}

/// The new tokens of one step.
pub(crate) struct RingStep<'a> {
    /// First slot and number of slots B; row b of the step is slot `slots.0 + b`.
    pub(crate) slots: (i64, i64),
    /// Positions `[B, T]`; padding goes on counting.
    pub(crate) positions: &'a Tensor,
    /// Position of each slot's last token that is no padding, `[B, 1]`.
    pub(crate) last: &'a Tensor,
}

impl Ring {
    /// Room for `slots` sequences of `context` positions, written at most `chunk` at a time.
    pub(crate) fn new(
        config: &Config,
        slots: usize,
        (context, chunk): (usize, usize),
        like: &Tensor,
    ) -> Result<Self> {
        let rows = [config.sliding_window - 1 + chunk, context + chunk];
        Ok(Self {
            buffers: Buffers::new(config, slots, rows, like)?,
            window: config.sliding_window,
            rows,
            types: types_of(config),
            like: like.alias()?,
        })
    }

    /// The plan of `step`, computed on the device from its tensors.
    pub(crate) fn plan(&self, step: &RingStep<'_>) -> Result<StepPlan> {
        let mut types = [None, None];
        for layer_type in LayerType::ALL {
            let index = layer_type.index();
            if self.types[index] {
                types[index] = Some(self.type_plan(layer_type, step)?);
            }
        }
        Ok(StepPlan { types })
    }

    fn type_plan(&self, layer_type: LayerType, step: &RingStep<'_>) -> Result<TypePlan> {
        let rows = self.rows[layer_type.index()] as i64;
        let (_, count) = step.slots;
        let index = [
            Tensor::arange(0, count, &self.like)?.unsqueeze(1)?, // [B, 1]
            step.positions.remainder_scalar(rows)?,              // [B, T]
        ];
        let row = Tensor::arange(0, rows, &self.like)?; // [rows]
        let query = step.positions.unsqueeze(2)?; // [B, T, 1]
        // The newest position ≤ `last` that belongs in each row; negative while a row is empty.
        let age = step.last.sub(&row)?.remainder_scalar(rows)?; // [B, rows]
        let held = step.last.sub(&age)?.unsqueeze(1)?; // [B, 1, rows]
        let mut mask = held.le(&query)?.logical_and(&held.ge_scalar(0)?)?;
        if layer_type == LayerType::Sliding {
            let oldest = query.add_scalar(-(self.window as f64))?;
            mask = mask.logical_and(&held.gt(&oldest)?)?;
        }
        Ok(TypePlan {
            attend: Attend::Written,
            mask: Some(mask.unsqueeze(1)?), // [B, 1, T, rows]
            rows: Rows::Ring { slots: step.slots, index: Rc::new(index) },
        })
    }

    /// See [`super::Cache::update`].
    pub(super) fn update(
        &self,
        layer_idx: usize,
        (k, v): (&Tensor, &Tensor),
        (first, count): (i64, i64),
        [slot, row]: &[Tensor; 2],
    ) -> Result<(Tensor, Tensor)> {
        let (keys, values) = self.buffers.of(layer_idx)?;
        let one = |buffer: &Tensor, new: &Tensor| {
            let buffer = buffer.narrow(0, first, count)?;
            // All heads of a token at once: [B, T, kv_heads, head_dim].
            buffer.transpose(1, 2)?.index_put_(&[slot, row], &new.transpose(1, 2)?)?;
            Ok(buffer)
        };
        Ok((one(keys, k)?, one(values, v)?))
    }
}
