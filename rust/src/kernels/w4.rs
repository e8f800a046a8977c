//! Four-bit weights in groups of 32 columns, times bfloat16: the product of a decode step, and of a prompt.
//!
//! Weights stand in records of 16 rows by 64 columns, which are read once from the first byte to the last. Lane n of a
//! vector belongs to row n, so that no sum goes across lanes. An integer is exact in bfloat16 and its product with
//! one in float32; a group's sum is multiplied by its factor once.

use std::ops::Range;

use half::{bf16, f16};

use super::{
    InstructionSet, Kernels, check_len, for_each_set,
    matrix::{Input, ROWS, Sums},
    memory::{Huge, Plain, Shared},
    multiply_add,
};
use crate::error::Result;

/// Columns that share a factor.
pub(crate) const GROUP_SIZE: usize = 32;

/// Columns of a record.
pub(super) const COLUMNS: usize = 64;

/// Bytes of a block of `Q4_0`.
const Q4_0_BYTES: usize = 2 + GROUP_SIZE / 2;

/// Where each of eight columns stands in a lane's word.
const SHIFTS: [u32; 8] = [0, 16, 4, 20, 8, 24, 12, 28];

/// Tokens for which plain Rust unpacks integers once.
const AT_ONCE: usize = 4;

/// 16 rows by 64 columns.
#[repr(C, align(64))]
#[derive(Clone, Copy)]
pub(super) struct Record {
    /// Factors of each row as bfloat16, or float16 if the matrix says so; the first group's in the low half.
    pub(super) factors: [u32; ROWS],
    /// Eight columns of each row: column 2t + p of eight in bits 16p + 4t, plus eight.
    pub(super) words: [[u32; ROWS]; COLUMNS / 8],
}

#[expect(unsafe_code, reason = "a promise about a plain type")]
// SAFETY: numbers only, aligned to 64 bytes.
unsafe impl Plain for Record {}

/// A weight `[rows, columns]`.
pub(crate) struct W4Matrix {
    rows: usize,
    columns: usize,
    /// Factors are float16: three bits more than bfloat16 has, which no rounding takes from them.
    is_half: bool,
    records: Huge<Record>,
}

impl W4Matrix {
    /// Whether a weight of `columns` columns can be a matrix of this kind.
    pub(crate) fn fits(columns: usize) -> bool {
        columns > 0 && columns.is_multiple_of(COLUMNS)
    }

    /// A weight of a width that [`W4Matrix::fits`], as compressed-tensors stores it. `words` `[rows, columns / 8]`, little-endian: eight
    /// columns each, plus eight, the first in the lowest bits; `factors` `[rows, columns / GROUP_SIZE]`.
    ///
    /// # Errors
    /// `Input` when there is no memory for it, `Internal` when lengths are others.
    pub(crate) fn new(
        [rows, columns]: [usize; 2],
        words: &[u8],
        factors: &[bf16],
        kernels: &Kernels,
    ) -> Result<Self> {
        check_len("words", words.len(), rows * columns / 2)?;
        check_len("factors", factors.len(), rows * columns / GROUP_SIZE)?;
        let records = fill([rows, columns], kernels, &|rows, records| {
            let words = &words[rows.start * columns / 2..rows.end * columns / 2];
            let factors = &factors[rows.start * columns / GROUP_SIZE..];
            pack(kernels.set, words, factors, rows.len(), records);
        })?;
        Ok(Self { rows, columns, is_half: false, records })
    }

    /// The same of `blocks` of ggml's type `Q4_0`, row after row: a float16 factor, then sixteen bytes, whose low halves are columns 0
    /// to 15, plus eight, and high halves columns 16 to 31. Factors stay as they are. `None` when one is not finite.
    ///
    /// # Errors
    /// As [`W4Matrix::new`].
    pub(crate) fn from_q4_0(
        [rows, columns]: [usize; 2],
        blocks: &[u8],
        kernels: &Kernels,
    ) -> Result<Option<Self>> {
        let (blocks, rest) = blocks.as_chunks::<Q4_0_BYTES>();
        check_len("blocks", blocks.len() + rest.len(), rows * columns / GROUP_SIZE)?;
        if blocks.iter().any(|block| !f16::from_le_bytes([block[0], block[1]]).is_finite()) {
            return Ok(None);
        }
        let records = fill([rows, columns], kernels, &|rows, records| {
            let groups = columns / GROUP_SIZE;
            let blocks = &blocks[rows.start * groups..rows.end * groups];
            pack_q4_0(blocks, records);
        })?;
        Ok(Some(Self { rows, columns, is_half: true, records }))
    }

    /// Bytes in memory.
    pub(super) fn bytes(&self) -> usize {
        size_of_val(&*self.records)
    }

    pub(super) fn shape(&self) -> [usize; 2] {
        [self.rows, self.columns]
    }

    /// See [`super::Matrix::sums`].
    pub(super) fn sums(
        &self,
        set: InstructionSet,
        blocks: Range<usize>,
        (input, tokens): (&Input<'_>, Range<usize>),
        sums: &mut [Sums],
    ) {
        let count = self.columns / COLUMNS;
        let records = &self.records[blocks.start * count..blocks.end * count];
        #[cfg(target_arch = "x86_64")]
        if set == InstructionSet::Avx512Bf16 {
            let x = (input.narrow(tokens), self.columns);
            super::w4_avx512::blocks((records, self.is_half), x, sums);
            return;
        }
        let count_tokens = tokens.len();
        let x = input.wide(tokens);
        for (records, sums) in records.chunks_exact(count).zip(sums.chunks_exact_mut(count_tokens))
        {
            block(set, (records, self.is_half), x, sums);
        }
    }
}

/// Records of a weight, four bits or eight, which `fill_rows(rows, records)` fills sixteen rows at a time, on all threads.
#[expect(unsafe_code, reason = "threads fill different records")]
pub(super) fn fill<R: Plain>(
    [rows, columns]: [usize; 2],
    kernels: &Kernels,
    fill_rows: &(dyn Fn(Range<usize>, &mut [R]) + Sync),
) -> Result<Huge<R>> {
    check_len("whole records", columns, columns / COLUMNS * COLUMNS)?;
    let (blocks, block) = (rows.div_ceil(ROWS), columns / COLUMNS);
    let mut records = Huge::<R>::zeroed(blocks * block)?;
    let parts = Shared::new(&mut records);
    kernels.pool.run(blocks, &|index| {
        // SAFETY: each piece has the records of its own rows.
        let records = unsafe { parts.part(index * block..(index + 1) * block) };
        // Rows that fill up the last record keep factor zero.
        fill_rows(index * ROWS..((index + 1) * ROWS).min(rows), records);
    })?;
    Ok(records)
}

/// Fills the records of some rows, at most sixteen, from their blocks.
fn pack_q4_0(blocks: &[[u8; Q4_0_BYTES]], records: &mut [Record]) {
    const GROUPS: usize = COLUMNS / GROUP_SIZE;
    let row = records.len() * GROUPS;
    for (lane, blocks) in blocks.chunks_exact(row).enumerate() {
        let (pairs, _) = blocks.as_chunks::<GROUPS>();
        for (record, pair) in records.iter_mut().zip(pairs) {
            for (group, block) in pair.iter().enumerate() {
                let factor = u32::from(u16::from_le_bytes([block[0], block[1]]));
                record.factors[lane] |= factor << (16 * group);
                let quants = &block[2..];
                for eight in 0..GROUP_SIZE / 8 {
                    // Eights 0 and 1 are low halves, 2 and 3 high ones.
                    let (bytes, half) = (&quants[eight % 2 * 8..][..8], 4 * (eight / 2));
                    record.words[GROUP_SIZE / 8 * group + eight][lane] =
                        bytes.iter().zip(SHIFTS).fold(0, |word, (&byte, shift)| {
                            word | u32::from(byte >> half & 15) << shift
                        });
                }
            }
        }
    }
}

/// Every second integer of eight, next to each other.
#[expect(clippy::inline_always, reason = "compiled anew for the instructions of each caller")]
#[inline(always)]
fn even_columns(word: u32) -> u32 {
    let bytes = word & 0x0f0f_0f0f;
    let pairs = (bytes | bytes >> 4) & 0x00ff_00ff;
    (pairs | pairs >> 8) & 0xffff
}

for_each_set! {
    /// Fills the records of some `rows`, at most sixteen, from their words and factors.
    fn pack(words: &[u8], factors: &[bf16], rows: usize, records: &mut [Record]) = pack_inner
}

#[inline(always)]
fn pack_inner<const FUSED: bool>(
    words: &[u8],
    factors: &[bf16],
    rows: usize,
    records: &mut [Record],
) {
    const WORDS: usize = COLUMNS / 8;
    let count = records.len();
    let (words, _) = words.as_chunks::<4>();
    let (words, _) = words.as_chunks::<WORDS>();
    let (factors, _) = factors.as_chunks::<2>();
    for (at, record) in records.iter_mut().enumerate() {
        for lane in 0..rows.min(ROWS) {
            let [low, high] = factors[lane * count + at].map(bf16::to_bits);
            record.factors[lane] = u32::from(low) | u32::from(high) << 16;
            let spread = words[lane * count + at].map(|word| {
                let word = u32::from_le_bytes(word);
                even_columns(word) | even_columns(word >> 4) << 16
            });
            for (words, word) in record.words.iter_mut().zip(spread) {
                words[lane] = word;
            }
        }
    }
}

for_each_set! {
    /// Sums of sixteen rows with each token of `x` `[tokens, columns]`.
    fn block(weight: (&[Record], bool), x: &[f32], sums: &mut [Sums]) = block_inner
}

#[expect(clippy::inline_always, reason = "compiled anew for the instructions of each caller")]
#[inline(always)]
fn block_inner<const FUSED: bool>(weight: (&[Record], bool), x: &[f32], sums: &mut [Sums]) {
    let (records, _) = weight;
    let columns = records.len() * COLUMNS;
    let (several, rest) = sums.as_chunks_mut::<AT_ONCE>();
    let (x_several, x_rest) = x.split_at(several.len() * AT_ONCE * columns);
    for (sums, x) in several.iter_mut().zip(x_several.chunks_exact(AT_ONCE * columns)) {
        tokens::<FUSED, AT_ONCE>(weight, x, sums);
    }
    for (sums, x) in rest.iter_mut().zip(x_rest.chunks_exact(columns)) {
        tokens::<FUSED, 1>(weight, x, std::array::from_mut(sums));
    }
}

/// The finite float16 `bits` as float32, in operations that vectors have: its exponent counts from 15, not from 127.
#[inline(always)]
pub(super) fn wide_half(bits: u32) -> f32 {
    // 2^(127 - 15); a product of subnormals is exact too.
    const SHIFT: f32 = f32::from_bits((127 + 112) << 23);
    let size = f32::from_bits((bits & 0x7fff) << 13) * SHIFT;
    f32::from_bits(size.to_bits() | (bits & 0x8000) << 16)
}

/// Plain Rust over the lanes of one vector, which the compiler makes vectors of where it may.
#[expect(clippy::inline_always, reason = "compiled anew for the instructions of each caller")]
#[inline(always)]
fn tokens<const FUSED: bool, const T: usize>(
    (records, is_half): (&[Record], bool),
    x: &[f32],
    out: &mut [Sums; T],
) {
    let columns = records.len() * COLUMNS;
    let x: [_; T] = std::array::from_fn(|token| &x[token * columns..(token + 1) * columns]);
    let mut total = [[0.0; ROWS]; T];
    for (index, record) in records.iter().enumerate() {
        for group in 0..COLUMNS / GROUP_SIZE {
            let mut sums = [[0.0; ROWS]; T];
            for eight in 0..GROUP_SIZE / 8 {
                let words = &record.words[GROUP_SIZE / 8 * group + eight];
                let at = index * COLUMNS + group * GROUP_SIZE + eight * 8;
                for (column, shift) in SHIFTS.iter().enumerate() {
                    let weights: [_; ROWS] =
                        std::array::from_fn(|lane| ((words[lane] >> shift & 15) as i32 - 8) as f32);
                    for (x, sums) in x.iter().zip(&mut sums) {
                        let x = x[at + column];
                        for (sum, weight) in sums.iter_mut().zip(weights) {
                            *sum = multiply_add::<FUSED>(weight, x, *sum);
                        }
                    }
                }
            }
            let factors: [_; ROWS] = std::array::from_fn(|lane| {
                let pair = record.factors[lane];
                if is_half {
                    wide_half(pair >> (16 * group) & 0xffff)
                } else {
                    f32::from_bits(if group == 0 { pair << 16 } else { pair & 0xffff_0000 })
                }
            });
            for (total, sums) in total.iter_mut().zip(&sums) {
                for lane in 0..ROWS {
                    total[lane] = multiply_add::<FUSED>(sums[lane], factors[lane], total[lane]);
                }
            }
        }
    }
    *out = total;
}

#[cfg(test)]
mod tests {
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
