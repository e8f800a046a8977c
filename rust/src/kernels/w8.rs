//! Eight-bit weights in groups of 32 columns with a factor: what GGUF files have for heads and small layers, and compressed-tensors
//! with eight bits.

use std::sync::atomic::{AtomicBool, Ordering::Relaxed};

use half::f16;

use super::{
    Kernels,
    integers::{self, IntegerMatrix, half_of},
    matrix::ROWS,
    memory::Plain,
    w4::{COLUMNS, GROUP_SIZE},
};
use crate::error::Result;

/// Columns of a lane's word.
const PER_WORD: usize = 4;

/// A weight `[rows, columns]`.
pub(crate) type W8Matrix = IntegerMatrix<Record>;

/// 16 rows by 64 columns.
#[repr(C, align(64))]
#[derive(Clone, Copy)]
pub(crate) struct Record {
    /// Factors of each row as bfloat16, or float16 if the matrix says so; the first group's in the low half.
    pub(super) factors: [u32; ROWS],
    /// Four columns of each row, plus 128, the first in the lowest byte.
    pub(super) words: [[u32; ROWS]; COLUMNS / PER_WORD],
}

#[expect(unsafe_code, reason = "a promise about a plain type")]
// SAFETY: numbers only, aligned to 64 bytes.
unsafe impl Plain for Record {}

impl integers::Record for Record {
    const COLUMNS: usize = COLUMNS;
    const SHARING: usize = GROUP_SIZE;
    const ZERO: i32 = 128;

    fn bytes(&self, four: usize) -> [u32; ROWS] {
        self.words[four]
    }

    fn factor(&self, part: usize, lane: usize, is_half: bool) -> f32 {
        half_of(self.factors[lane], part == 1, is_half)
    }
}

/// Thirty-two columns of a row: a factor, and integers from zero on.
pub(crate) type Group<F> = (F, [u8; GROUP_SIZE]);

impl W8Matrix {
    /// A weight of a width that [`IntegerMatrix::fits`]; `group(index)` gives each group of 32, row after row, with a float16. `None`
    /// when one is not finite.
    ///
    /// # Errors
    /// `Input` when there is no memory for it, `Internal` when a thread panicked.
    pub(crate) fn of_halves(
        shape: [usize; 2],
        group: &(dyn Fn(usize) -> Group<f16> + Sync),
        kernels: &Kernels,
    ) -> Result<Option<Self>> {
        let is_finite = AtomicBool::new(true);
        let group = |index| {
            let (factor, integers) = group(index);
            if !factor.is_finite() {
                is_finite.store(false, Relaxed);
            }
            (factor.to_bits(), integers)
        };
        let matrix = Self::of_groups(shape, &group, true, kernels)?;
        Ok(is_finite.into_inner().then_some(matrix))
    }

    /// The same, with the bits of float16 if `is_half`, else of bfloat16.
    ///
    /// # Errors
    /// As [`W8Matrix::of_halves`].
    pub(crate) fn of_groups(
        shape: [usize; 2],
        group: &(dyn Fn(usize) -> Group<u16> + Sync),
        is_half: bool,
        kernels: &Kernels,
    ) -> Result<Self> {
        let groups = shape[1] / GROUP_SIZE;
        Self::filled(shape, is_half, kernels, &|rows, records| {
            for (lane, row) in rows.enumerate() {
                for at in 0..groups {
                    let (factor, integers) = group(row * groups + at);
                    let (record, half) = (&mut records[at / 2], at % 2);
                    record.factors[lane] |= u32::from(factor) << (16 * half);
                    let words = &mut record.words[half * GROUP_SIZE / PER_WORD..];
                    for (words, four) in words.iter_mut().zip(integers.as_chunks::<PER_WORD>().0) {
                        words[lane] = u32::from_le_bytes(*four);
                    }
                }
            }
        })
    }
}
