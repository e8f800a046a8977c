//! Four-bit products with AVX-512 BF16: one instruction multiplies 32 pairs of values exactly and adds them to 16 sums.
#![expect(unsafe_code, reason = "instructions that not every machine has")]

use std::arch::x86_64::{
    __m512, __m512i, _mm512_and_si512, _mm512_castsi512_ps, _mm512_cvtepi32_epi16, _mm512_cvtph_ps,
    _mm512_dpbf16_ps, _mm512_fmadd_ps, _mm512_load_si512, _mm512_loadu_ps, _mm512_loadu_si512,
    _mm512_permutexvar_epi16, _mm512_set1_epi32, _mm512_setzero_ps, _mm512_setzero_si512,
    _mm512_slli_epi32, _mm512_srli_epi16, _mm512_srli_epi32, _mm512_storeu_ps,
};

use half::bf16;

use super::{
    matrix::{ROWS, Sums},
    pairs_avx512::{AHEAD, pair_at, pairs_of, prefetch},
    w4::{COLUMNS, GROUP_SIZE, Record},
};

/// Records of several blocks of rows × `x` `[tokens, columns]`, at most eight tokens → `sums` `[blocks][tokens]`.
///
/// Two blocks and eight tokens at once have as many sums as there are registers for: one core makes 476 GFLOP/s of
/// them, all that the instruction can, and 409 with one block (docs/log.md). What is added to a sum in
/// which order is the same for any number of either.
/// Factors are float16 where `is_half`, else bfloat16.
pub(super) fn blocks(
    (records, is_half): (&[Record], bool),
    (x, columns): (&[bf16], usize),
    sums: &mut [Sums],
) {
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
    unsafe { run((records, is_half), x, count, sums) };
}

/// # Safety
/// The machine has the instructions; lengths are those of [`blocks`] for `T` tokens.
#[target_feature(enable = "avx512f,avx512bw,avx512bf16")]
unsafe fn all<const R: usize, const T: usize>(
    (records, is_half): (&[Record], bool),
    x: &[bf16],
    count: usize,
    sums: &mut [Sums],
) {
    let mut records = records.chunks_exact(R * count);
    let mut sums = sums.chunks_exact_mut(R * T);
    for (records, sums) in records.by_ref().zip(sums.by_ref()) {
        // SAFETY: of `R` blocks.
        unsafe { tile::<R, T>((records, is_half), x, count, sums) };
    }
    for (records, sums) in
        records.remainder().chunks_exact(count).zip(sums.into_remainder().chunks_exact_mut(T))
    {
        // SAFETY: of one block.
        unsafe { tile::<1, T>((records, is_half), x, count, sums) };
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
    (records, is_half): (&[Record], bool),
    x: &[bf16],
    count: usize,
    sums: &mut [Sums],
) {
    debug_assert!(records.len() == R * count && x.len() == T * count * COLUMNS);
    debug_assert!(sums.len() == R * T);
    // Entries 16 to 31 repeat the first sixteen, so that the bit above an integer does not matter.
    let integers: [bf16; 32] = std::array::from_fn(|i| bf16::from_f32((i % 16) as f32 - 8.0));
    // SAFETY: 64 bytes.
    let integers = unsafe { _mm512_loadu_si512(integers.as_ptr().cast()) };
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
            for eight in 0..GROUP_SIZE / 8 {
                let mut words = [_mm512_setzero_si512(); R];
                for (block, words) in words.iter_mut().enumerate() {
                    // SAFETY: `index` is below `count`.
                    let record = unsafe { at(records, block * count + index) };
                    *words = load(&record.words[GROUP_SIZE / 8 * group + eight]);
                }
                let column = index * COLUMNS + group * GROUP_SIZE + eight * 8;
                for pair in 0..4 {
                    let mut weights = [pairs_of(_mm512_setzero_si512()); R];
                    for (words, weights) in words.iter().zip(&mut weights) {
                        let shifted = match pair {
                            0 => *words,
                            1 => _mm512_srli_epi16::<4>(*words),
                            2 => _mm512_srli_epi16::<8>(*words),
                            _ => _mm512_srli_epi16::<12>(*words),
                        };
                        *weights = pairs_of(_mm512_permutexvar_epi16(shifted, integers));
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
                let factors = factors_of(&record.factors, is_half, group);
                for token in 0..T {
                    let chain = chains[block][token];
                    // SAFETY: there are `R * T` sums. They stay in memory, for there are more than registers.
                    unsafe { add_product(sums, block * T + token, chain, factors) };
                }
            }
        }
    }
}

#[target_feature(enable = "avx512f")]
pub(super) fn load(words: &[u32; ROWS]) -> __m512i {
    // SAFETY: 64 bytes, at a multiple of 64 in every record.
    unsafe { _mm512_load_si512(words.as_ptr().cast()) }
}

/// The low or the high float16 of each lane as float32.
#[target_feature(enable = "avx512f")]
pub(super) fn halves_of(pairs: __m512i, group: usize) -> __m512 {
    let halves = if group == 0 { pairs } else { _mm512_srli_epi32::<16>(pairs) };
    _mm512_cvtph_ps(_mm512_cvtepi32_epi16(halves))
}

/// The factors of one group as float32.
#[target_feature(enable = "avx512f")]
fn factors_of(pairs: &[u32; ROWS], is_half: bool, group: usize) -> __m512 {
    let pairs = load(pairs);
    if is_half {
        return halves_of(pairs, group);
    }
    _mm512_castsi512_ps(if group == 0 {
        _mm512_slli_epi32::<16>(pairs)
    } else {
        _mm512_and_si512(pairs, _mm512_set1_epi32(-65536))
    })
}

/// # Safety
/// There is such a record for as long.
pub(super) unsafe fn at<'a, R>(records: *const R, index: usize) -> &'a R {
    // SAFETY: as the caller says.
    let record = unsafe { records.add(index) };
    // SAFETY: as the caller says.
    unsafe { &*record }
}

/// # Safety
/// Sums `index` can be read and written.
#[target_feature(enable = "avx512f")]
pub(super) unsafe fn add_product(sums: *mut Sums, index: usize, chain: __m512, factors: __m512) {
    // SAFETY: as the caller says.
    let sums = unsafe { sums.add(index) }.cast::<f32>();
    // SAFETY: 64 bytes.
    let before = unsafe { _mm512_loadu_ps(sums) };
    let after = _mm512_fmadd_ps(chain, factors, before);
    // SAFETY: 64 bytes.
    unsafe { _mm512_storeu_ps(sums, after) };
}
