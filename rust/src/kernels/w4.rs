//! Four-bit weights in groups of 32 columns, times bfloat16: the product of a decode step, and of a prompt.
//!
//! Weights stand in records of 16 rows by 64 columns, which are read once from the first byte to the last. Lane n of a
//! vector belongs to row n, so that no sum goes across lanes. An integer is exact in bfloat16 and its product with
//! one in float32; a group's sum is multiplied by its factor once.

use std::sync::Mutex;

use half::bf16;

use super::{InstructionSet, Pool};
use crate::error::{Error, Result};

/// Columns that share a factor.
pub(crate) const GROUP_SIZE: usize = 32;

const ROWS: usize = 16;
const COLUMNS: usize = 64;

/// Bytes of weights that a thread claims at once: smaller pieces cost more claims than they balance.
const CHUNK_BYTES: usize = 400 << 10;

/// Where each of eight columns stands in a lane's word.
const SHIFTS: [u32; 8] = [0, 16, 4, 20, 8, 24, 12, 28];

/// 16 rows by 64 columns.
#[repr(C, align(64))]
#[derive(Clone, Copy)]
struct Record {
    /// Factors of each row as bfloat16, the first group's in the low half.
    factors: [u32; ROWS],
    /// Eight columns of each row: column 2t + p of eight in bits 16p + 4t, plus eight.
    words: [[u32; ROWS]; COLUMNS / 8],
}

/// A weight `[rows, columns]`.
pub(crate) struct W4Matrix {
    rows: usize,
    columns: usize,
    records: Vec<Record>,
}

impl W4Matrix {
    /// `word(row, i)`: columns 8i to 8i + 7 of a row, each plus eight, the first in the lowest bits (as
    /// compressed-tensors stores them); `factor(row, group)`. `None` when the columns are no whole number of records.
    pub(crate) fn new(
        [rows, columns]: [usize; 2],
        word: impl Fn(usize, usize) -> u32,
        factor: impl Fn(usize, usize) -> bf16,
    ) -> Option<Self> {
        if rows == 0 || columns == 0 || !columns.is_multiple_of(COLUMNS) {
            return None;
        }
        let mut records = Vec::with_capacity(rows.div_ceil(ROWS) * (columns / COLUMNS));
        for first_row in (0..rows).step_by(ROWS) {
            for first in (0..columns).step_by(COLUMNS) {
                // Rows that fill up the last record have factor zero.
                let mut record = Record { factors: [0; ROWS], words: [[0; ROWS]; COLUMNS / 8] };
                for lane in 0..ROWS.min(rows - first_row) {
                    let row = first_row + lane;
                    let group = first / GROUP_SIZE;
                    let (low, high) = (factor(row, group), factor(row, group + 1));
                    record.factors[lane] = pair(low, high);
                    for (eight, words) in record.words.iter_mut().enumerate() {
                        let word = word(row, first / 8 + eight);
                        words[lane] = even_columns(word) | even_columns(word >> 4) << 16;
                    }
                }
                records.push(record);
            }
        }
        Some(Self { rows, columns, records })
    }

    /// Bytes in memory.
    pub(crate) fn bytes(&self) -> usize {
        size_of_val(&*self.records)
    }

    /// Rows: the width of a product.
    pub(crate) fn rows(&self) -> usize {
        self.rows
    }

    /// `x` `[tokens, columns]` → `out` `[tokens, rows]`, both bfloat16.
    ///
    /// # Errors
    /// `Internal` when their lengths do not say so, or a thread panicked.
    pub(crate) fn multiply(
        &self,
        x: &[bf16],
        out: &mut [bf16],
        (set, pool): (InstructionSet, &Pool),
    ) -> Result<()> {
        let tokens = x.len() / self.columns;
        if x.len() != tokens * self.columns || out.len() != tokens * self.rows {
            return Err(Error::Internal(format!(
                "expected {} by {} values, found {} for {}",
                self.columns,
                self.rows,
                x.len(),
                out.len()
            )));
        }
        let (mut wide, mut pairs) = (Vec::new(), Vec::new());
        if set == InstructionSet::Avx512Bf16 {
            pairs.extend(x.as_chunks::<2>().0.iter().map(|&[low, high]| pair(low, high)));
        } else {
            wide.extend(x.iter().map(|value| value.to_f32()));
        }
        if tokens == 0 {
            return Ok(());
        }
        let blocks = self.rows.div_ceil(ROWS);
        let block_bytes = self.columns / COLUMNS * size_of::<Record>();
        let chunk = (CHUNK_BYTES / block_bytes).clamp(1, blocks.div_ceil(2 * pool.threads()));
        // Block after block, so that each thread has a piece of its own: [blocks, tokens, ROWS].
        let mut sums = vec![bf16::ZERO; blocks * tokens * ROWS];
        let pieces: Vec<_> = sums.chunks_mut(chunk * tokens * ROWS).map(Mutex::new).collect();
        pool.run(pieces.len(), &|index| {
            let Ok(mut piece) = pieces[index].lock() else { return };
            for (block, sums) in (index * chunk..).zip(piece.chunks_exact_mut(tokens * ROWS)) {
                let (sums, _) = sums.as_chunks_mut::<ROWS>();
                match set {
                    #[cfg(target_arch = "x86_64")]
                    InstructionSet::Avx512Bf16 => x86::block_bf16(self.block(block), &pairs, sums),
                    _ => {
                        for (x, sums) in wide.chunks_exact(self.columns).zip(sums) {
                            *sums = one_token(set, self.block(block), x).map(bf16::from_f32);
                        }
                    }
                }
            }
        })?;
        drop(pieces);
        for (block, sums) in sums.chunks_exact(tokens * ROWS).enumerate() {
            let first = block * ROWS;
            let count = ROWS.min(self.rows - first);
            for (out, sums) in out.chunks_exact_mut(self.rows).zip(sums.chunks_exact(ROWS)) {
                out[first..first + count].copy_from_slice(&sums[..count]);
            }
        }
        Ok(())
    }

    /// The records of sixteen rows.
    fn block(&self, block: usize) -> &[Record] {
        let count = self.columns / COLUMNS;
        &self.records[block * count..(block + 1) * count]
    }
}

/// Two values in one word, the first in the low half.
fn pair(low: bf16, high: bf16) -> u32 {
    u32::from(low.to_bits()) | u32::from(high.to_bits()) << 16
}

/// Every second integer of eight, next to each other.
fn even_columns(word: u32) -> u32 {
    let bytes = word & 0x0f0f_0f0f;
    let pairs = (bytes | bytes >> 4) & 0x00ff_00ff;
    (pairs | pairs >> 8) & 0xffff
}

/// The sums of sixteen rows with one token `x`.
fn one_token(set: InstructionSet, records: &[Record], x: &[f32]) -> [f32; ROWS] {
    match set {
        #[cfg(target_arch = "x86_64")]
        InstructionSet::Avx2 => x86::block_avx2(records, x),
        #[cfg(target_arch = "x86_64")]
        InstructionSet::Avx512 => x86::block_avx512(records, x),
        _ => block::<false>(records, x),
    }
}

/// Plain Rust over the lanes of one vector, which the compiler makes vectors of where it may.
#[expect(clippy::inline_always, reason = "compiled anew for the instructions of each caller")]
#[inline(always)]
fn block<const FUSED: bool>(records: &[Record], x: &[f32]) -> [f32; ROWS] {
    let multiply_add = |a: f32, b: f32, c: f32| if FUSED { a.mul_add(b, c) } else { a * b + c };
    let mut total = [0.0; ROWS];
    for (record, x) in records.iter().zip(x.chunks_exact(COLUMNS)) {
        for group in 0..COLUMNS / GROUP_SIZE {
            let mut sums = [0.0; ROWS];
            let words = &record.words[4 * group..4 * group + 4];
            for (words, x) in words.iter().zip(x[group * GROUP_SIZE..].chunks_exact(8)) {
                for (shift, &x) in SHIFTS.iter().zip(x) {
                    for lane in 0..ROWS {
                        let q = (words[lane] >> shift & 15) as i32 - 8;
                        sums[lane] = multiply_add(q as f32, x, sums[lane]);
                    }
                }
            }
            for lane in 0..ROWS {
                let factor = record.factors[lane];
                let bits = if group == 0 { factor << 16 } else { factor & 0xffff_0000 };
                total[lane] = multiply_add(sums[lane], f32::from_bits(bits), total[lane]);
            }
        }
    }
    total
}

#[cfg(target_arch = "x86_64")]
#[expect(unsafe_code, reason = "instructions that not every machine has")]
mod x86 {
    use std::arch::x86_64::{
        __m256bh, __m256i, __m512, __m512bh, __m512i, _mm256_storeu_si256, _mm512_add_ps,
        _mm512_and_si512, _mm512_castsi512_ps, _mm512_cvtneps_pbh, _mm512_dpbf16_ps,
        _mm512_fmadd_ps, _mm512_load_si512, _mm512_loadu_si512, _mm512_permutexvar_epi16,
        _mm512_set1_epi32, _mm512_setzero_ps, _mm512_slli_epi32, _mm512_srli_epi16,
    };

    use half::bf16;

    use super::{COLUMNS, GROUP_SIZE, ROWS, Record, block};

    /// Tokens for which integers are unpacked once; with four instead a prompt takes half as long again (docs/log.md).
    const AT_ONCE: usize = 8;

    /// See [`block`].
    pub(super) fn block_avx2(records: &[Record], x: &[f32]) -> [f32; ROWS] {
        #[target_feature(enable = "avx2,fma")]
        fn inner(records: &[Record], x: &[f32]) -> [f32; ROWS] {
            block::<true>(records, x)
        }
        // SAFETY: `InstructionSet::available` has seen that the machine has both.
        unsafe { inner(records, x) }
    }

    /// See [`block`].
    pub(super) fn block_avx512(records: &[Record], x: &[f32]) -> [f32; ROWS] {
        #[target_feature(enable = "avx512f,avx512bw,fma")]
        fn inner(records: &[Record], x: &[f32]) -> [f32; ROWS] {
            block::<true>(records, x)
        }
        // SAFETY: as above.
        unsafe { inner(records, x) }
    }

    /// Sixteen rows with every token of `x` `[tokens, columns / 2]`, pairs of neighbours, as many at a time as are worth it.
    pub(super) fn block_bf16(records: &[Record], x: &[u32], sums: &mut [[bf16; ROWS]]) {
        // SAFETY: as above.
        unsafe { tokens(records, x, sums) }
    }

    #[target_feature(enable = "avx512f,avx512bw,avx512bf16")]
    fn tokens(records: &[Record], x: &[u32], sums: &mut [[bf16; ROWS]]) {
        let (x, _) = x.as_chunks::<4>();
        let columns = records.len() * COLUMNS / 8;
        let (several_tokens, rest) = sums.as_chunks_mut::<AT_ONCE>();
        let (x_several, x_rest) = x.split_at(several_tokens.len() * AT_ONCE * columns);
        for (sums, x) in several_tokens.iter_mut().zip(x_several.chunks_exact(AT_ONCE * columns)) {
            let x: [_; AT_ONCE] =
                std::array::from_fn(|token| &x[token * columns..(token + 1) * columns]);
            several(records, x, sums);
        }
        for (sums, x) in rest.iter_mut().zip(x_rest.chunks_exact(columns)) {
            several(records, [x], std::array::from_mut(sums));
        }
    }

    /// `T` tokens at once, each integer unpacked once for all of them; `x`: of each token, eight columns at a time.
    #[target_feature(enable = "avx512f,avx512bw,avx512bf16")]
    fn several<const T: usize>(
        records: &[Record],
        x: [&[[u32; 4]]; T],
        out: &mut [[bf16; ROWS]; T],
    ) {
        // Entries 16 to 31 repeat the first sixteen, so that the bit above an integer does not matter.
        let integers: [bf16; 32] = std::array::from_fn(|i| bf16::from_f32((i % 16) as f32 - 8.0));
        let integers = load(&integers);
        let mut total = [_mm512_setzero_ps(); T];
        for (index, record) in records.iter().enumerate() {
            let factors = load_words(&record.factors);
            for group in 0..COLUMNS / GROUP_SIZE {
                // Four chains of additions for each token hide the instruction's latency.
                let mut chains = [[_mm512_setzero_ps(); 4]; T];
                for eight in 0..4 {
                    let words = load_words(&record.words[4 * group + eight]);
                    let at = (index * COLUMNS + group * GROUP_SIZE) / 8 + eight;
                    let shifted = [
                        words,
                        _mm512_srli_epi16::<4>(words),
                        _mm512_srli_epi16::<8>(words),
                        _mm512_srli_epi16::<12>(words),
                    ];
                    for (pair, shifted) in shifted.into_iter().enumerate() {
                        let weights = pairs_of(_mm512_permutexvar_epi16(shifted, integers));
                        for token in 0..T {
                            let x = pairs_of(_mm512_set1_epi32(x[token][at][pair] as i32));
                            let chain = &mut chains[token][pair];
                            *chain = _mm512_dpbf16_ps(*chain, weights, x);
                        }
                    }
                }
                let factor = _mm512_castsi512_ps(if group == 0 {
                    _mm512_slli_epi32::<16>(factors)
                } else {
                    _mm512_and_si512(factors, _mm512_set1_epi32(-65536))
                });
                for (total, [a, b, c, d]) in total.iter_mut().zip(chains) {
                    let sum = _mm512_add_ps(_mm512_add_ps(a, b), _mm512_add_ps(c, d));
                    *total = _mm512_fmadd_ps(sum, factor, *total);
                }
            }
        }
        for (out, total) in out.iter_mut().zip(total) {
            store(out, total);
        }
    }

    #[target_feature(enable = "avx512f")]
    fn load_words(words: &[u32; ROWS]) -> __m512i {
        // SAFETY: 64 bytes, and a record begins at a multiple of 64.
        unsafe { _mm512_load_si512(words.as_ptr().cast()) }
    }

    #[target_feature(enable = "avx512f")]
    fn load(values: &[bf16; 32]) -> __m512i {
        // SAFETY: 64 bytes.
        unsafe { _mm512_loadu_si512(values.as_ptr().cast()) }
    }

    #[target_feature(enable = "avx512f")]
    fn pairs_of(bits: __m512i) -> __m512bh {
        // SAFETY: both are 512 bits without a meaning of their own.
        unsafe { std::mem::transmute::<__m512i, __m512bh>(bits) }
    }

    /// Rounds to nearest even, as everything else does.
    #[target_feature(enable = "avx512f,avx512bf16")]
    fn store(out: &mut [bf16; ROWS], sums: __m512) {
        let rounded = _mm512_cvtneps_pbh(sums);
        // SAFETY: both are 256 bits without a meaning of their own.
        let rounded = unsafe { std::mem::transmute::<__m256bh, __m256i>(rounded) };
        // SAFETY: `out` has 32 bytes.
        unsafe { _mm256_storeu_si256(out.as_mut_ptr().cast(), rounded) }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn q_of(row: usize, column: usize) -> i32 {
        ((row * 7 + column * 5 + row * column) % 16) as i32 - 8
    }

    fn word_of(row: usize, eight: usize) -> u32 {
        (0..8).map(|i| ((q_of(row, 8 * eight + i) + 8) as u32) << (4 * i)).sum()
    }

    fn factor_of(row: usize, group: usize) -> bf16 {
        bf16::from_f32(0.01 + ((row * 3 + group * 11) % 17) as f32 * 0.004)
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(24))]
        #[test]
        fn every_instruction_set_gives_the_product_with_the_unpacked_weights(
            rows in 1_usize..70, records in 1_usize..5, tokens in 1_usize..12, threads in 1_usize..4,
            seed in 0_usize..1000,
        ) {
            let columns = records * COLUMNS;
            let matrix = W4Matrix::new([rows, columns], word_of, factor_of).unwrap();
            let x: Vec<_> = (0..tokens * columns)
                .map(|i| bf16::from_f32(((i * 37 + seed * 13) % 101) as f32 / 50.0 - 1.0))
                .collect();
            let pool = Pool::new(threads);
            for set in InstructionSet::available() {
                let mut out = vec![bf16::NAN; tokens * rows];
                matrix.multiply(&x, &mut out, (set, &pool)).unwrap();
                for token in 0..tokens {
                    for row in 0..rows {
                        let weight = |c| q_of(row, c) as f64 * factor_of(row, c / 32).to_f64();
                        let product = |c| weight(c) * x[token * columns + c].to_f64();
                        let wanted: f64 = (0..columns).map(product).sum();
                        let size: f64 = (0..columns).map(|c| product(c).abs()).sum();
                        let found = out[token * rows + row].to_f64();
                        // One rounding to bfloat16, and float32's in the sum.
                        let bar = wanted.abs() / 256.0 + size * 1e-6;
                        prop_assert!((found - wanted).abs() <= bar, "{set:?} {found} {wanted}");
                    }
                }
            }
        }
    }

    #[test]
    fn a_token_gets_the_same_bits_alone_and_among_others_with_any_number_of_threads() {
        let matrix = W4Matrix::new([100, 128], word_of, factor_of).unwrap();
        let x: Vec<_> = (0..19 * 128).map(|i| bf16::from_f32((i % 23) as f32 - 11.0)).collect();
        for set in InstructionSet::available() {
            let run = |x: &[bf16], threads| {
                let mut out = vec![bf16::ZERO; x.len() / 128 * 100];
                matrix.multiply(x, &mut out, (set, &Pool::new(threads))).unwrap();
                out
            };
            let together = run(&x, 3);
            for (token, x) in x.chunks(128).enumerate() {
                assert_eq!(run(x, 1), together[token * 100..][..100], "{set:?}");
            }
        }
    }

    #[test]
    fn slices_of_other_lengths_are_refused() {
        let matrix = W4Matrix::new([16, 64], word_of, factor_of).unwrap();
        let (x, mut out) = (vec![bf16::ONE; 65], vec![bf16::ZERO; 16]);
        let how = (InstructionSet::Portable, &Pool::new(1));
        assert!(matrix.multiply(&x, &mut out, how).is_err());
        assert!(matrix.multiply(&x[..64], &mut out[..15], how).is_err());
        assert!(matrix.multiply(&x[..64], &mut out, how).is_ok());
        assert!(matrix.multiply(&[], &mut [], how).is_ok());
        assert!(W4Matrix::new([16, 96], word_of, factor_of).is_none());
    }
}
