//! Weights that are integers with factors, times bfloat16: what forms of four bits to eight have in common.
//!
//! Weights stand in records of 16 rows by some columns, which are read once from the first byte to the last. Lane n of a
//! vector belongs to row n, so that no sum goes across lanes. Columns that share a factor are summed first, and the sum is
//! multiplied with it once.

use std::ops::Range;

use super::{
    InstructionSet, Kernels, check_len,
    fixed::Form,
    input::Input,
    matrix::{ROWS, Sums},
    memory::{Huge, Plain, Shared},
};
use crate::error::Result;

#[cfg(target_arch = "x86_64")]
use super::{integers_avx2::Halves, integers_avx512::Vectors};
#[cfg(not(target_arch = "x86_64"))]
use {Record as Halves, Record as Vectors};

/// Tokens for which plain Rust unpacks integers once.
const AT_ONCE: usize = 4;

/// 16 rows by [`Record::COLUMNS`] columns.
pub(super) trait Record: Plain {
    /// Columns of a record: a multiple of 32.
    const COLUMNS: usize;
    /// Columns that share a factor: 32 or 16.
    const SHARING: usize;
    /// What is taken from every integer to have the weight's; integers are stored from zero on.
    const ZERO: i32;
    /// Whether a minimum, one for each factor, is taken from the weights.
    const HAS_MINIMA: bool = false;

    /// The integers of four columns, a byte each, the first column's lowest.
    fn bytes(&self, four: usize) -> [u32; ROWS];

    /// The factor of part `part` of the row. The file's numbers are float16 if `is_half`, else bfloat16.
    fn factor(&self, part: usize, lane: usize, is_half: bool) -> f32;

    /// Likewise what is taken from each weight.
    fn minimum(&self, _part: usize, _lane: usize) -> f32 {
        0.0
    }
}

/// A weight `[rows, columns]`.
pub(crate) struct IntegerMatrix<R> {
    rows: usize,
    columns: usize,
    /// Factors are float16: three bits more than bfloat16 has, which no rounding takes from them.
    is_half: bool,
    records: Huge<R>,
}

#[expect(private_bounds, reason = "records are the kernels' own; others name a matrix by its form")]
impl<R: Record> IntegerMatrix<R> {
    /// Whether a weight of `columns` columns can be a matrix of this kind.
    pub(crate) fn fits(columns: usize) -> bool {
        columns > 0 && columns.is_multiple_of(R::COLUMNS)
    }

    /// Records over rows, and over columns.
    fn records_of([rows, columns]: [usize; 2]) -> [usize; 2] {
        [rows.div_ceil(ROWS), columns / R::COLUMNS]
    }

    /// Bytes that a weight of `shape` has in memory.
    pub(super) fn bytes_of(shape: [usize; 2]) -> usize {
        Self::records_of(shape).iter().product::<usize>() * size_of::<R>()
    }

    /// A weight whose records `fill(rows, records)` fills, sixteen rows at a time, on all threads.
    ///
    /// # Errors
    /// `Input` when there is no memory for it, `Internal` when a thread panicked or `columns` are no whole records.
    #[expect(unsafe_code, reason = "threads fill different records")]
    pub(super) fn filled(
        [rows, columns]: [usize; 2],
        is_half: bool,
        kernels: &Kernels,
        fill: &(dyn Fn(Range<usize>, &mut [R]) + Sync),
    ) -> Result<Self> {
        check_len("whole records", columns, columns / R::COLUMNS * R::COLUMNS)?;
        let [blocks, block] = Self::records_of([rows, columns]);
        let mut records = Huge::<R>::zeroed(blocks * block)?;
        let parts = Shared::new(&mut records);
        kernels.pool.run(blocks, &|index| {
            // SAFETY: each piece has the records of its own rows.
            let records = unsafe { parts.part(index * block..(index + 1) * block) };
            // Rows that fill up the last record keep factor zero.
            fill(index * ROWS..((index + 1) * ROWS).min(rows), records);
        })?;
        Ok(Self { rows, columns, is_half, records })
    }

    /// Bytes in memory.
    pub(super) fn bytes(&self) -> usize {
        size_of_val(&*self.records)
    }

    pub(super) fn shape(&self) -> [usize; 2] {
        [self.rows, self.columns]
    }
}

#[expect(private_bounds, reason = "as above")]
impl<R: Halves + Vectors> IntegerMatrix<R> {
    /// See [`super::Matrix::sums`].
    pub(super) fn sums(
        &self,
        set: InstructionSet,
        blocks: Range<usize>,
        (input, tokens): (&Input<'_>, Range<usize>),
        sums: &mut [Sums],
    ) {
        let count = self.columns / R::COLUMNS;
        let records = &self.records[blocks.start * count..blocks.end * count];
        let weights = (records, self.is_half);
        match set.multiplies() {
            #[cfg(target_arch = "x86_64")]
            Some(Form::Bytes) => {
                super::integers_avx512::blocks(weights, count, input.fixed(tokens), sums);
            }
            #[cfg(target_arch = "x86_64")]
            Some(Form::Pairs) => {
                super::integers_avx2::blocks(weights, count, input.fixed(tokens), sums);
            }
            _ => {
                let sums = sums.chunks_exact_mut(tokens.len());
                let x = input.wide(tokens);
                for (records, sums) in records.chunks_exact(count).zip(sums) {
                    block((records, self.is_half), x, sums);
                }
            }
        }
    }
}

/// Sums of sixteen rows with each token of `x` `[tokens, columns]`.
fn block<R: Record>(weight: (&[R], bool), x: &[f32], sums: &mut [Sums]) {
    let columns = weight.0.len() * R::COLUMNS;
    let (several, rest) = sums.as_chunks_mut::<AT_ONCE>();
    let (x_several, x_rest) = x.split_at(several.len() * AT_ONCE * columns);
    for (sums, x) in several.iter_mut().zip(x_several.chunks_exact(AT_ONCE * columns)) {
        tokens::<R, AT_ONCE>(weight, x, sums);
    }
    for (sums, x) in rest.iter_mut().zip(x_rest.chunks_exact(columns)) {
        tokens::<R, 1>(weight, x, std::array::from_mut(sums));
    }
}

/// Plain Rust over the lanes of one vector, which the compiler makes vectors of where it may.
fn tokens<R: Record, const T: usize>(
    (records, is_half): (&[R], bool),
    x: &[f32],
    out: &mut [Sums; T],
) {
    let columns = records.len() * R::COLUMNS;
    let x: [_; T] = std::array::from_fn(|token| &x[token * columns..(token + 1) * columns]);
    let mut total = [[0.0; ROWS]; T];
    for (index, record) in records.iter().enumerate() {
        for part in 0..R::COLUMNS / R::SHARING {
            let mut sums = [[0.0; ROWS]; T];
            let first = index * R::COLUMNS + part * R::SHARING;
            for four in 0..R::SHARING / 4 {
                let bytes = record.bytes(part * R::SHARING / 4 + four);
                for (column, shift) in [0, 8, 16, 24].iter().enumerate() {
                    let weights: [_; ROWS] = std::array::from_fn(|lane| {
                        ((bytes[lane] >> shift & 255).cast_signed() - R::ZERO) as f32
                    });
                    for (x, sums) in x.iter().zip(&mut sums) {
                        let x = x[first + 4 * four + column];
                        for (sum, weight) in sums.iter_mut().zip(weights) {
                            *sum += weight * x;
                        }
                    }
                }
            }
            let factors: [_; ROWS] = std::array::from_fn(|lane| record.factor(part, lane, is_half));
            for (total, sums) in total.iter_mut().zip(&sums) {
                for lane in 0..ROWS {
                    total[lane] += sums[lane] * factors[lane];
                }
            }
            if R::HAS_MINIMA {
                let minima: [_; ROWS] = std::array::from_fn(|lane| record.minimum(part, lane));
                for (total, x) in total.iter_mut().zip(x) {
                    let x = sum_of(&x[first..first + R::SHARING]);
                    for lane in 0..ROWS {
                        total[lane] -= minima[lane] * x;
                    }
                }
            }
        }
    }
    *out = total;
}

/// In eight lanes.
fn sum_of(x: &[f32]) -> f32 {
    let mut lanes = [0.0; 8];
    for x in x.as_chunks::<8>().0 {
        for (lane, x) in lanes.iter_mut().zip(x) {
            *lane += x;
        }
    }
    lanes.iter().sum()
}

/// The finite float16 `bits` as float32, in operations that vectors have: its exponent counts from 15, not from 127.
pub(super) fn wide_half(bits: u32) -> f32 {
    // 2^(127 - 15); a product of subnormals is exact too.
    const SHIFT: f32 = f32::from_bits((127 + 112) << 23);
    let size = f32::from_bits((bits & 0x7fff) << 13) * SHIFT;
    f32::from_bits(size.to_bits() | (bits & 0x8000) << 16)
}

/// The low or, where `is_high`, the high half of a word as float32: a float16 or a bfloat16.
pub(super) fn half_of(pair: u32, is_high: bool, is_half: bool) -> f32 {
    match (is_half, is_high) {
        (true, _) => wide_half(pair >> (16 * u32::from(is_high)) & 0xffff),
        (false, false) => f32::from_bits(pair << 16),
        (false, true) => f32::from_bits(pair & 0xffff_0000),
    }
}

#[cfg(test)]
mod tests {
    use half::f16;

    use super::*;

    #[test]
    fn every_finite_float16_is_widened_to_its_value() {
        for bits in 0..=u16::MAX {
            let half = f16::from_bits(bits);
            if half.is_finite() {
                assert_eq!(wide_half(bits.into()).to_bits(), half.to_f32().to_bits());
            }
        }
    }
}
