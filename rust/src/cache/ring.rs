//! The layout with static shapes: the entry for position `p` stands in row `p mod rows`.
//!
//! A sliding layer has exactly `window` rows. A full layer has `context` rows and some spare ones, so that
//! nothing wraps there: padding after a prompt and tokens made beyond a stop land in rows that no query
//! sees before they are written again. No shape depends on how far a sequence is.
//!
//! One new token a slot is written first, and attention reads the rows. Several tokens attend to the
//! rows as they were and to their own keys beside them; then each row takes the newest position that
//! belongs to it, padding left out. A slot needs no clearing, because the mask is made from positions.
//!
//! Nothing is changed in place: a step leaves new tensors in the cache's structure, and a compiler that
//! may overwrite the old ones makes that an update in place.

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
    /// The slot of each row of the step, `[B]`; `None` when row b is slot b and no slot is missing.
    pub(crate) slots: Option<&'a Tensor>,
    /// Positions `[B, T]`, consecutive; padding goes on counting.
    pub(crate) positions: &'a Tensor,
    /// Position of each slot's last token that is no padding, `[B, 1]`.
    pub(crate) last: &'a Tensor,
    /// Rows of full layers that attention reads: all positions before the step, and for T = 1 its own,
    /// lie below it.
    pub(crate) read: usize,
}

/// Which rows a step reads and writes in the layers of one type.
pub(crate) struct RingRows {
    slots: Option<Tensor>, // [B]
    slot: Tensor,          // [B, 1, 1]
    read: i64,
    write: Write,
}

enum Write {
    /// Into these rows `[B, 1, T]`, before attention reads.
    First(Tensor),
    /// Into these rows `[B, 1, T]`, after attention has read.
    After(Tensor),
    /// After attention has read: each row takes new token `token` `[B, 1, rows, 1]` where `hit` is true.
    Newest { token: Tensor, hit: Tensor },
}

impl Ring {
    /// Room for `slots` sequences of `context` positions, and `spare` more rows in full layers: at least
    /// the most tokens that one launch adds.
    pub(crate) fn new(
        config: &Config,
        slots: usize,
        (context, spare): (usize, usize),
        like: &Tensor,
    ) -> Result<Self> {
        let rows = [config.sliding_window, context + spare];
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
        let sizes = step.positions.sizes()?;
        let (batch, tokens) = (sizes[0], sizes[1]);
        let rows = self.rows[layer_type.index()];
        let all_rows = rows as i64;
        let sliding = layer_type == LayerType::Sliding;
        let read = if sliding { all_rows } else { rows.min(step.read) as i64 };
        let (mask, write) = if tokens == 1 {
            let row = if sliding {
                step.positions.remainder_scalar(all_rows)?
            } else {
                step.positions.alias()?
            };
            (self.mask_of_rows(read, sliding, step.positions)?, Write::First(row.unsqueeze(1)?))
        } else {
            let mask = self.mask_of_several(read, sliding, step)?;
            let write = if sliding {
                self.newest(all_rows, step)?
            } else {
                Write::After(step.positions.unsqueeze(1)?)
            };
            (mask, write)
        };
        let slot = match step.slots {
            Some(slots) => slots.alias()?,
            None => Tensor::arange(0, batch, &self.like)?,
        };
        let slots = step.slots.map(Tensor::alias).transpose()?;
        let slot = slot.unsqueeze(1)?.unsqueeze(2)?;
        let rows = RingRows { slots, slot, read, write };
        Ok(TypePlan { attend: Attend::Written, mask: Some(mask), rows: Rows::Ring(Rc::new(rows)) })
    }

    /// For one new token a slot at `positions` `[B, 1]`, already written: `[B, 1, 1, read]`.
    fn mask_of_rows(&self, read: i64, sliding: bool, positions: &Tensor) -> Result<Tensor> {
        let row = Tensor::arange(0, read, &self.like)?; // [read]
        let mut mask = row.le(positions)?; // [B, read]
        if sliding {
            // Once a window is full every row holds one of its positions.
            mask = mask.logical_or(&positions.ge_scalar(read)?)?;
        }
        mask.unsqueeze(1)?.unsqueeze(1)
    }

    /// For T new tokens beside `read` old rows: `[B, 1, T, read + T]`.
    fn mask_of_several(&self, read: i64, sliding: bool, step: &RingStep<'_>) -> Result<Tensor> {
        let sizes = step.positions.sizes()?;
        let query = step.positions.unsqueeze(2)?; // [B, T, 1]
        let key = step.positions.unsqueeze(1)?; // [B, 1, T]
        let mut new = key.le(&query)?; // [B, T, T]
        let row = Tensor::arange(0, read, &self.like)?; // [read]
        let before = step.positions.narrow(1, 0, 1)?.add_scalar_i64(-1)?; // [B, 1]
        let old = if sliding {
            // The newest position before the step that belongs in each row; negative while it is empty.
            let age = before.sub(&row)?.remainder_scalar(read)?; // [B, read]
            let held = before.sub(&age)?.unsqueeze(1)?; // [B, 1, read]
            let oldest = query.add_scalar_i64(-(self.window as i64))?;
            new = new.logical_and(&key.gt(&oldest)?)?;
            held.ge_scalar(0)?.logical_and(&held.gt(&oldest)?)? // [B, T, read]
        } else {
            row.le(&before)?.unsqueeze(1)?.expand(&[sizes[0], sizes[1], read])?
        };
        let mask = if read == 0 { new } else { Tensor::cat(&[&old, &new], 2)? };
        mask.unsqueeze(1)
    }

    /// Which new token each of a sliding layer's rows takes.
    fn newest(&self, rows: i64, step: &RingStep<'_>) -> Result<Write> {
        let row = Tensor::arange(0, rows, &self.like)?;
        let age = step.last.sub(&row)?.remainder_scalar(rows)?; // [B, rows]
        let first = step.positions.narrow(1, 0, 1)?;
        let token = step.last.sub(&age)?.sub(&first)?; // [B, rows]; negative: the row keeps what it has
        let hit = token.ge_scalar(0)?;
        let token = token.clamp_min(0.0)?;
        let shape = |x: &Tensor| x.unsqueeze(1)?.unsqueeze(3);
        Ok(Write::Newest { token: shape(&token)?, hit: shape(&hit)? })
    }

    /// See [`super::Cache::update`].
    pub(super) fn update(
        &mut self,
        layer_idx: usize,
        (k, v): (&Tensor, &Tensor),
        rows: &RingRows,
    ) -> Result<(Tensor, Tensor)> {
        let (keys, values) = self.buffers.of(layer_idx)?;
        let head = Tensor::arange(0, keys.sizes()?[1], &self.like)?.unsqueeze(1)?; // [kv_heads, 1]
        let (keys, seen_keys) = rows.apply(keys, k, &head)?;
        let (values, seen_values) = rows.apply(values, v, &head)?;
        self.buffers.layers[layer_idx] = Some((keys, values));
        Ok((seen_keys, seen_values))
    }
}

impl RingRows {
    /// One buffer after the step, and what the step's queries see of it.
    fn apply(&self, buffer: &Tensor, new: &Tensor, head: &Tensor) -> Result<(Tensor, Tensor)> {
        // One vector a head and token: with all heads of a token at once XLA would store rows before heads,
        // and copy the ring to attend to it.
        let put = |row: &Tensor| buffer.index_put(&[&self.slot, head, row], new);
        match &self.write {
            Write::First(row) => {
                let written = put(row)?;
                let seen = self.of_slots(&written)?.narrow(2, 0, self.read)?;
                Ok((written, seen))
            }
            Write::After(row) => Ok((put(row)?, self.beside(&self.of_slots(buffer)?, new)?)),
            Write::Newest { token, hit } => {
                let old = self.of_slots(buffer)?;
                let seen = self.beside(&old, new)?;
                let merged = hit.where_(&new.take_along_dim(token, 2)?, &old)?;
                let written = match &self.slots {
                    Some(slots) => buffer.index_copy(0, slots, &merged)?,
                    None => merged,
                };
                Ok((written, seen))
            }
        }
    }

    fn of_slots(&self, buffer: &Tensor) -> Result<Tensor> {
        match &self.slots {
            Some(slots) => buffer.index_select(0, slots),
            None => buffer.alias(),
        }
    }

    fn beside(&self, old: &Tensor, new: &Tensor) -> Result<Tensor> {
        if self.read == 0 {
            return new.alias();
        }
        Tensor::cat(&[&old.narrow(2, 0, self.read)?, new], 2)
    }
}
