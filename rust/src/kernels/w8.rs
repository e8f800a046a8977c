//! Eight-bit weights in groups of 32 columns with a float16 factor, times bfloat16: what GGUF files have for heads and small layers.
//!
//! Records are as those of four bits: 16 rows by 64 columns, lane n belongs to row n. An integer is exact in bfloat16 and its
//! product with one in float32; a group's sum is multiplied by its factor once.

use std::{
    ops::Range,
    sync::atomic::{AtomicBool, Ordering::Relaxed},
};

use half::f16;

use super::{
    InstructionSet, Kernels, for_each_set,
    matrix::{Input, ROWS, Sums},
    memory::{Huge, Plain},
    multiply_add,
    w4::{COLUMNS, GROUP_SIZE, fill, wide_half},
};
use crate::error::Result;

/// Columns of a lane's word.
const PER_WORD: usize = 4;

/// Tokens for which plain Rust unpacks integers once.
const AT_ONCE: usize = 4;

/// 16 rows by 64 columns.
#[repr(C, align(64))]
#[derive(Clone, Copy)]
pub(super) struct Record {
    /// Factors of each row as float16, the first group's in the low half.
    pub(super) factors: [u32; ROWS],
    /// Four columns of each row, the first in the lowest byte.
    pub(super) words: [[u32; ROWS]; COLUMNS / PER_WORD],
}

#[expect(unsafe_code, reason = "a promise about a plain type")]
// SAFETY: numbers only, aligned to 64 bytes.
unsafe impl Plain for Record {}

/// A weight `[rows, columns]`.
pub(crate) struct W8Matrix {
    rows: usize,
    columns: usize,
    records: Huge<Record>,
}

impl W8Matrix {
    /// Whether a weight of `columns` columns can be a matrix of this kind.
    pub(crate) fn fits(columns: usize) -> bool {
        columns > 0 && columns.is_multiple_of(COLUMNS)
    }

    /// A weight of a width that [`W8Matrix::fits`]; `group(index)` gives factor and integers of each group of 32, row after row. `None`
    /// when a factor is not finite.
    ///
    /// # Errors
    /// `Input` when there is no memory for it, `Internal` when a thread panicked.
    pub(crate) fn new(
        [rows, columns]: [usize; 2],
        group: &(dyn Fn(usize) -> (f16, [i8; GROUP_SIZE]) + Sync),
        kernels: &Kernels,
    ) -> Result<Option<Self>> {
        let groups = columns / GROUP_SIZE;
        let is_finite = AtomicBool::new(true);
        let records = fill([rows, columns], kernels, &|rows, records: &mut [Record]| {
            for (lane, row) in rows.enumerate() {
                for at in 0..groups {
                    let (factor, integers) = group(row * groups + at);
                    if !factor.is_finite() {
                        is_finite.store(false, Relaxed);
                    }
                    let (record, half) = (&mut records[at / 2], at % 2);
                    record.factors[lane] |= u32::from(factor.to_bits()) << (16 * half);
                    let (fours, _) = integers.as_chunks::<PER_WORD>();
                    let words = &mut record.words[half * GROUP_SIZE / PER_WORD..];
                    for (words, four) in words.iter_mut().zip(fours) {
                        words[lane] = u32::from_le_bytes(four.map(i8::cast_unsigned));
                    }
                }
            }
        })?;
        Ok(is_finite.into_inner().then_some(Self { rows, columns, records }))
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
            super::w8_avx512::blocks(records, input.narrow(tokens), self.columns, sums);
            return;
        }
        let count_tokens = tokens.len();
        let x = input.wide(tokens);
        for (records, sums) in records.chunks_exact(count).zip(sums.chunks_exact_mut(count_tokens))
        {
            block(set, records, x, sums);
        }
    }
}

for_each_set! {
    /// Sums of sixteen rows with each token of `x` `[tokens, columns]`.
    fn block(records: &[Record], x: &[f32], sums: &mut [Sums]) = block_inner
}

#[expect(clippy::inline_always, reason = "compiled anew for the instructions of each caller")]
#[inline(always)]
fn block_inner<const FUSED: bool>(records: &[Record], x: &[f32], sums: &mut [Sums]) {
    let columns = records.len() * COLUMNS;
    let (several, rest) = sums.as_chunks_mut::<AT_ONCE>();
    let (x_several, x_rest) = x.split_at(several.len() * AT_ONCE * columns);
    for (sums, x) in several.iter_mut().zip(x_several.chunks_exact(AT_ONCE * columns)) {
        tokens::<FUSED, AT_ONCE>(records, x, sums);
    }
    for (sums, x) in rest.iter_mut().zip(x_rest.chunks_exact(columns)) {
        tokens::<FUSED, 1>(records, x, std::array::from_mut(sums));
    }
}

/// Plain Rust over the lanes of one vector, which the compiler makes vectors of where it may.
#[inline(always)]
fn tokens<const FUSED: bool, const T: usize>(records: &[Record], x: &[f32], out: &mut [Sums; T]) {
    const WORDS: usize = GROUP_SIZE / PER_WORD;
    let columns = records.len() * COLUMNS;
    let x: [_; T] = std::array::from_fn(|token| &x[token * columns..(token + 1) * columns]);
    let mut total = [[0.0; ROWS]; T];
    for (index, record) in records.iter().enumerate() {
        for group in 0..COLUMNS / GROUP_SIZE {
            let mut sums = [[0.0; ROWS]; T];
            for (four, words) in record.words[group * WORDS..][..WORDS].iter().enumerate() {
                let at = index * COLUMNS + group * GROUP_SIZE + four * PER_WORD;
                for column in 0..PER_WORD {
                    let weights: [_; ROWS] = std::array::from_fn(|lane| {
                        ((words[lane] << (24 - 8 * column)).cast_signed() >> 24) as f32
                    });
                    for (x, sums) in x.iter().zip(&mut sums) {
                        let x = x[at + column];
                        for (sum, weight) in sums.iter_mut().zip(weights) {
                            *sum = multiply_add::<FUSED>(weight, x, *sum);
                        }
                    }
                }
            }
            let factors: [_; ROWS] = std::array::from_fn(|lane| {
                wide_half(record.factors[lane] >> (16 * group) & 0xffff)
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
