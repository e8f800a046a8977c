//! ggml's K types: 256 columns share a float16 or two, and parts of them factors of six or eight bits that multiply it.
//!
//! `Q4_K` and `Q5_K` have a factor and a minimum, without a sign, for each 32 columns; `Q6_K` a factor, with one, for each 16
//! (`ggml-common.h`, and gguf-py's `quants.py`). Nothing is rounded: a record has the file's own numbers.

use std::sync::atomic::{AtomicBool, Ordering::Relaxed};

use half::f16;

use super::{
    Kernels,
    integers::{self, IntegerMatrix, wide_half},
    matrix::ROWS,
    memory::Plain,
};
use crate::error::Result;

/// Words for a bit of each column beyond four: `Q5_K`.
pub(super) const ONE_BIT: usize = 8;

/// And for two bits: `Q6_K`.
pub(super) const TWO_BITS: usize = 16;

/// Columns of a record.
const COLUMNS: usize = 256;

/// Where minima begin among scales.
pub(super) const MINIMA: usize = 8;

/// 16 rows by 256 columns. `HIGH` is 0, [`ONE_BIT`] or [`TWO_BITS`].
#[repr(C, align(64))]
#[derive(Clone, Copy)]
pub(crate) struct Record<const HIGH: usize> {
    /// Of each row the float16 that multiplies factors, and in the high half the one that multiplies minima.
    pub(super) factors: [u32; ROWS],
    /// Factors of each 32 columns, then their minima; or of each 16 columns, with a sign.
    pub(super) scales: [[u8; ROWS]; 16],
    /// Four bits of each column: column 4t + p of eight in bits 8p + 4t.
    pub(super) low: [[u32; ROWS]; COLUMNS / 8],
    /// The bits above: column 4t + p of 32 in bit 8p + t, or of 16 in bits 8p + 2t.
    pub(super) high: [[u32; ROWS]; HIGH],
}

#[expect(unsafe_code, reason = "a promise about a plain type")]
// SAFETY: numbers only, aligned to 64 bytes.
unsafe impl<const HIGH: usize> Plain for Record<HIGH> {}

/// Weights `[rows, columns]`.
pub(crate) type Q4KMatrix = IntegerMatrix<Record<0>>;
pub(crate) type Q5KMatrix = IntegerMatrix<Record<ONE_BIT>>;
pub(crate) type Q6KMatrix = IntegerMatrix<Record<TWO_BITS>>;

impl<const HIGH: usize> integers::Record for Record<HIGH> {
    const COLUMNS: usize = COLUMNS;
    const SHARING: usize = if HIGH == TWO_BITS { 16 } else { 32 };
    const ZERO: i32 = if HIGH == TWO_BITS { 32 } else { 0 };
    const HAS_MINIMA: bool = HIGH != TWO_BITS;

    fn bytes(&self, four: usize) -> [u32; ROWS] {
        let (words, shift) = (&self.low[four / 2], 4 * (four % 2));
        let low: [_; ROWS] = std::array::from_fn(|lane| words[lane] >> shift & 0x0f0f_0f0f);
        let (words, shift, mask) = match HIGH {
            ONE_BIT => (&self.high[four / 8], four % 8, 0x0101_0101),
            TWO_BITS => (&self.high[four / 4], 2 * (four % 4), 0x0303_0303),
            _ => return low,
        };
        std::array::from_fn(|lane| low[lane] | (words[lane] >> shift & mask) << 4)
    }

    fn factor(&self, part: usize, lane: usize, _is_half: bool) -> f32 {
        let scale = self.scales[part][lane];
        let scale =
            if HIGH == TWO_BITS { f32::from(scale.cast_signed()) } else { f32::from(scale) };
        wide_half(self.factors[lane] & 0xffff) * scale
    }

    fn minimum(&self, part: usize, lane: usize) -> f32 {
        wide_half(self.factors[lane] >> 16) * f32::from(self.scales[part + MINIMA][lane])
    }
}

/// 256 columns of a row, as a file's block has them.
pub(crate) struct KBlock {
    /// What multiplies factors, and minima.
    pub(crate) d: f16,
    pub(crate) dmin: f16,
    /// Factors of each 32 columns, then their minima; or of each 16 columns, with a sign.
    pub(crate) scales: [u8; 16],
    /// From zero on.
    pub(crate) integers: [u8; COLUMNS],
}

impl KBlock {
    /// One that makes no weight.
    pub(crate) const NONE: Self =
        Self { d: f16::NAN, dmin: f16::NAN, scales: [0; 16], integers: [0; COLUMNS] };
}

impl<const HIGH: usize> IntegerMatrix<Record<HIGH>> {
    /// A weight of a width that [`IntegerMatrix::fits`], from its blocks, row after row. `None` when a float16 of theirs is not finite.
    ///
    /// # Errors
    /// `Input` when there is no memory for it, `Internal` when a thread panicked.
    pub(crate) fn of_blocks(
        shape: [usize; 2],
        block: &(dyn Fn(usize) -> KBlock + Sync),
        kernels: &Kernels,
    ) -> Result<Option<Self>> {
        let each = shape[1] / COLUMNS;
        let is_finite = AtomicBool::new(true);
        let matrix = Self::filled(shape, true, kernels, &|rows, records| {
            for (lane, row) in rows.enumerate() {
                for (at, record) in records.iter_mut().enumerate() {
                    let block = block(row * each + at);
                    if !(block.d.is_finite() && block.dmin.is_finite()) {
                        is_finite.store(false, Relaxed);
                    }
                    put(record, lane, &block);
                }
            }
        })?;
        Ok(is_finite.into_inner().then_some(matrix))
    }
}

/// Makes a block a record's row.
fn put<const HIGH: usize>(record: &mut Record<HIGH>, lane: usize, block: &KBlock) {
    record.factors[lane] = u32::from(block.d.to_bits()) | u32::from(block.dmin.to_bits()) << 16;
    for (to, scale) in record.scales.iter_mut().zip(block.scales) {
        to[lane] = scale;
    }
    for (four, integers) in block.integers.as_chunks::<4>().0.iter().enumerate() {
        let word = u32::from_le_bytes(*integers);
        record.low[four / 2][lane] |= (word & 0x0f0f_0f0f) << (4 * (four % 2));
        match HIGH {
            ONE_BIT => record.high[four / 8][lane] |= (word >> 4 & 0x0101_0101) << (four % 8),
            TWO_BITS => {
                record.high[four / 4][lane] |= (word >> 4 & 0x0303_0303) << (2 * (four % 4));
            }
            _ => {}
        }
    }
}
