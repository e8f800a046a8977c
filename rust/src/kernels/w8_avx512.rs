//! Eight-bit products with AVX-512 BF16, as those of four bits; integers become bfloat16 by way of float32, which is exact.
#![expect(unsafe_code, reason = "instructions that not every machine has")]

use std::arch::x86_64::{
    __m512bh, __m512i, _mm512_and_si512, _mm512_castps_si512, _mm512_cvtepi32_ps, _mm512_dpbf16_ps,
    _mm512_or_si512, _mm512_set1_epi32, _mm512_setzero_ps, _mm512_setzero_si512, _mm512_slli_epi32,
    _mm512_srai_epi32, _mm512_srli_epi32,
};

use half::bf16;

use super::{
    matrix::{ROWS, Sums},
    pairs_avx512::{AHEAD, pair_at, pairs_of, prefetch},
    w4::{COLUMNS, GROUP_SIZE},
    w4_avx512::{add_product, at, halves_of, load},
    w8::Record,
};

/// Records of several blocks of rows × `x` `[tokens, columns]`, at most eight tokens → `sums` `[blocks][tokens]`. What is added to
/// a sum in which order is the same for any number of either.
pub(super) fn blocks(records: &[Record], x: &[bf16], columns: usize, sums: &mut [Sums]) {
    let tokens = x.len() / columns;
    let count = columns / COLUMNS;
    assert!(x.len() == tokens * columns && columns == count * COLUMNS);
    assert!(records.len() * tokens == sums.len() * count && tokens <= 8);
    let run = match tokens {
        0 => return,
        // One stream of memory is read faster than two at once.
        1 => all::<1, 1>,
        2 => all::<2, 2>,
        3 => all::<2, 3>,
        4 => all::<2, 4>,
        5 => all::<2, 5>,
        6 => all::<2, 6>,
        7 => all::<2, 7>,
        _ => all::<2, 8>,
    };
    // SAFETY: `InstructionSet::available` has seen that the machine has them, and the lengths fit each other.
    unsafe { run(records, x, count, sums) };
}

/// # Safety
/// The machine has the instructions; lengths are those of [`blocks`] for `T` tokens.
#[target_feature(enable = "avx512f,avx512bw,avx512bf16")]
unsafe fn all<const R: usize, const T: usize>(
    records: &[Record],
    x: &[bf16],
    count: usize,
    sums: &mut [Sums],
) {
    let mut records = records.chunks_exact(R * count);
    let mut sums = sums.chunks_exact_mut(R * T);
    for (records, sums) in records.by_ref().zip(sums.by_ref()) {
        // SAFETY: of `R` blocks.
        unsafe { tile::<R, T>(records, x, count, sums) };
    }
    for (records, sums) in
        records.remainder().chunks_exact(count).zip(sums.into_remainder().chunks_exact_mut(T))
    {
        // SAFETY: of one block.
        unsafe { tile::<1, T>(records, x, count, sums) };
    }
}

/// # Safety
/// As for [`all`], with `R` blocks of `count` records.
#[expect(
    clippy::needless_range_loop,
    reason = "arrays that iterators borrow would leave registers"
)]
#[target_feature(enable = "avx512f,avx512bw,avx512bf16")]
unsafe fn tile<const R: usize, const T: usize>(
    records: &[Record],
    x: &[bf16],
    count: usize,
    sums: &mut [Sums],
) {
    debug_assert!(records.len() == R * count && x.len() == T * count * COLUMNS);
    debug_assert!(sums.len() == R * T);
    sums.fill([0.0; ROWS]);
    let (records, x, sums) = (records.as_ptr(), x.as_ptr(), sums.as_mut_ptr());
    for index in 0..count {
        if T == 1 {
            let ahead = records.wrapping_add(index).wrapping_byte_add(AHEAD);
            for line in 0..size_of::<Record>() / 64 {
                prefetch(ahead.wrapping_byte_add(64 * line).cast());
            }
        }
        for group in 0..COLUMNS / GROUP_SIZE {
            let mut chains = [[_mm512_setzero_ps(); T]; R];
            for four in 0..GROUP_SIZE / 4 {
                let mut words = [_mm512_setzero_si512(); R];
                for (block, words) in words.iter_mut().enumerate() {
                    // SAFETY: `index` is below `count`.
                    let record = unsafe { at(records, block * count + index) };
                    *words = load(&record.words[GROUP_SIZE / 4 * group + four]);
                }
                let column = index * COLUMNS + group * GROUP_SIZE + four * 4;
                for pair in 0..2 {
                    let mut weights = [pairs_of(_mm512_setzero_si512()); R];
                    for (words, weights) in words.iter().zip(&mut weights) {
                        *weights = if pair == 0 {
                            both(_mm512_slli_epi32::<24>(*words), _mm512_slli_epi32::<16>(*words))
                        } else {
                            both(_mm512_slli_epi32::<8>(*words), *words)
                        };
                    }
                    for token in 0..T {
                        let place = token * count * COLUMNS + column + 2 * pair;
                        // SAFETY: the token has `count * COLUMNS` values.
                        let x = unsafe { pair_at(x, place) };
                        for block in 0..R {
                            let chain = chains[block][token];
                            chains[block][token] = _mm512_dpbf16_ps(chain, weights[block], x);
                        }
                    }
                }
            }
            for block in 0..R {
                // SAFETY: as above.
                let record = unsafe { at(records, block * count + index) };
                let factors = halves_of(load(&record.factors), group);
                for token in 0..T {
                    let chain = chains[block][token];
                    // SAFETY: there are `R * T` sums. They stay in memory, for there are more than registers.
                    unsafe { add_product(sums, block * T + token, chain, factors) };
                }
            }
        }
    }
}

/// The integers in the top bytes of `low` and `high` as pairs of bfloat16, `low`'s first.
#[target_feature(enable = "avx512f")]
fn both(low: __m512i, high: __m512i) -> __m512bh {
    let low = _mm512_castps_si512(_mm512_cvtepi32_ps(_mm512_srai_epi32::<24>(low)));
    let high = _mm512_castps_si512(_mm512_cvtepi32_ps(_mm512_srai_epi32::<24>(high)));
    let upper = _mm512_set1_epi32(-65536);
    pairs_of(_mm512_or_si512(_mm512_srli_epi32::<16>(low), _mm512_and_si512(high, upper)))
}
