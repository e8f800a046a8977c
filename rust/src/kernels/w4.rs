//! Four-bit weights in groups of 32 columns with a factor: compressed-tensors' W4A16, and GGUF's `Q4_0`.

use half::f16;

use super::{
    Kernels, check_len, for_each_set,
    integers::{self, IntegerMatrix, half_of},
    matrix::ROWS,
    memory::Plain,
};
use crate::error::Result;

/// Columns that share a factor.
pub(crate) const GROUP_SIZE: usize = 32;

/// Columns of a record.
pub(super) const COLUMNS: usize = 64;

/// Bytes of a block of `Q4_0`.
const Q4_0_BYTES: usize = 2 + GROUP_SIZE / 2;

/// A weight `[rows, columns]`.
pub(crate) type W4Matrix = IntegerMatrix<Record>;

/// 16 rows by 64 columns.
#[repr(C, align(64))]
#[derive(Clone, Copy)]
pub(crate) struct Record {
    /// Factors of each row as bfloat16, or float16 if the matrix says so; the first group's in the low half.
    pub(super) factors: [u32; ROWS],
    /// Eight columns of each row: column 4t + p of eight in bits 8p + 4t, plus eight.
    pub(super) words: [[u32; ROWS]; COLUMNS / 8],
}

#[expect(unsafe_code, reason = "a promise about a plain type")]
// SAFETY: numbers only, aligned to 64 bytes.
unsafe impl Plain for Record {}

impl integers::Record for Record {
    const COLUMNS: usize = COLUMNS;
    const SHARING: usize = GROUP_SIZE;
    const ZERO: i32 = 8;

    fn bytes(&self, four: usize) -> [u32; ROWS] {
        let (words, shift) = (&self.words[four / 2], 4 * (four % 2));
        std::array::from_fn(|lane| words[lane] >> shift & 0x0f0f_0f0f)
    }

    fn factor(&self, part: usize, lane: usize, is_half: bool) -> f32 {
        half_of(self.factors[lane], part == 1, is_half)
    }
}

impl W4Matrix {
    /// A weight of a width that [`IntegerMatrix::fits`], as compressed-tensors stores it. `words` `[rows, columns / 8]`, little-endian:
    /// eight columns each, plus eight, the first in the lowest bits; `factors` `[rows, columns / GROUP_SIZE]` are the bits of float16 if
    /// `is_half`, else of bfloat16.
    ///
    /// # Errors
    /// `Input` when there is no memory for it, `Internal` when lengths are others.
    pub(crate) fn of_words(
        [rows, columns]: [usize; 2],
        words: &[u8],
        (factors, is_half): (&[u16], bool),
        kernels: &Kernels,
    ) -> Result<Self> {
        check_len("words", words.len(), rows * columns / 2)?;
        check_len("factors", factors.len(), rows * columns / GROUP_SIZE)?;
        Self::filled([rows, columns], is_half, kernels, &|rows, records| {
            let words = &words[rows.start * columns / 2..rows.end * columns / 2];
            let factors = &factors[rows.start * columns / GROUP_SIZE..];
            pack(kernels.set, words, factors, rows.len(), records);
        })
    }

    /// The same of `blocks` of ggml's type `Q4_0`, row after row: a float16 factor, then sixteen bytes, whose low halves are columns 0
    /// to 15, plus eight, and high halves columns 16 to 31. Factors stay as they are. `None` when one is not finite.
    ///
    /// # Errors
    /// As [`W4Matrix::of_words`].
    pub(crate) fn of_q4_0(
        [rows, columns]: [usize; 2],
        blocks: &[u8],
        kernels: &Kernels,
    ) -> Result<Option<Self>> {
        let (blocks, rest) = blocks.as_chunks::<Q4_0_BYTES>();
        check_len("blocks", blocks.len() + rest.len(), rows * columns / GROUP_SIZE)?;
        if blocks.iter().any(|block| !f16::from_le_bytes([block[0], block[1]]).is_finite()) {
            return Ok(None);
        }
        let groups = columns / GROUP_SIZE;
        Self::filled([rows, columns], true, kernels, &|rows, records| {
            pack_q4_0(&blocks[rows.start * groups..rows.end * groups], records);
        })
        .map(Some)
    }
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
                    let integer = |column: usize| u32::from(bytes[column] >> half & 15);
                    record.words[GROUP_SIZE / 8 * group + eight][lane] =
                        (0..8).fold(0, |word, i| word | integer(i) << (8 * (i % 4) + i / 4 * 4));
                }
            }
        }
    }
}

/// Four integers of four bits, a byte each.
#[expect(clippy::inline_always, reason = "compiled anew for the instructions of each caller")]
#[inline(always)]
fn spread(four: u32) -> u32 {
    let pairs = (four | four << 8) & 0x00ff_00ff;
    (pairs | pairs << 4) & 0x0f0f_0f0f
}

for_each_set! {
    /// Fills the records of some `rows`, at most sixteen, from their words and factors.
    fn pack(words: &[u8], factors: &[u16], rows: usize, records: &mut [Record]) = pack_inner
}

#[inline(always)]
fn pack_inner<const FUSED: bool>(
    words: &[u8],
    factors: &[u16],
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
            let [low, high] = factors[lane * count + at].map(u32::from);
            record.factors[lane] = low | high << 16;
            let ours = words[lane * count + at].map(|word| {
                let word = u32::from_le_bytes(word);
                spread(word & 0xffff) | spread(word >> 16) << 4
            });
            for (words, word) in record.words.iter_mut().zip(ours) {
                words[lane] = word;
            }
        }
    }
}
