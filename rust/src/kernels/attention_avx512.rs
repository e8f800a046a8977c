//! Scores and sums of values with AVX-512 BF16.
#![expect(unsafe_code, reason = "instructions that not every machine has")]

use std::arch::x86_64::{
    __m512bh, _mm512_dpbf16_ps, _mm512_loadu_ps, _mm512_loadu_si512, _mm512_set1_epi32,
    _mm512_setzero_ps, _mm512_setzero_si512, _mm512_storeu_ps,
};

use half::bf16;

use super::{
    attention::{LANES, PART, Words},
    pairs_avx512::{pair_at, pairs_of},
};

/// Products of the keys of `B` times 16 positions, `[head_dim / 2]` each, with each head's query: `q` `[H, head_dim]`. With 16 sums at
/// once none waits for its own last addition.
pub(super) fn scores<const H: usize, const B: usize>(
    keys: [&[Words]; B],
    q: &[bf16],
) -> [[[f32; LANES]; H]; B] {
    let pairs = keys[0].len();
    assert!(q.len() == H * 2 * pairs && keys.iter().all(|keys| keys.len() == pairs));
    // SAFETY: `InstructionSet::available` has seen that the machine has them, and the lengths fit each other.
    unsafe { scores_inner(keys, q) }
}

/// # Safety
/// The machine has the instructions; `q` has `H` heads of two values a word of each of `keys`, which are as many.
#[target_feature(enable = "avx512f,avx512bf16")]
unsafe fn scores_inner<const H: usize, const B: usize>(
    keys: [&[Words]; B],
    q: &[bf16],
) -> [[[f32; LANES]; H]; B] {
    let mut sums = [[_mm512_setzero_ps(); H]; B];
    let (q, pairs) = (q.as_ptr(), keys[0].len());
    for at in 0..pairs {
        let mut words = [pairs_of(_mm512_setzero_si512()); B];
        for (words, keys) in words.iter_mut().zip(keys) {
            // SAFETY: all have so many words.
            *words = unsafe { load(keys, at) };
        }
        for head in 0..H {
            // SAFETY: the head's query has two values a word.
            let pair = unsafe { pair_at(q, 2 * (head * pairs + at)) };
            for (sums, words) in sums.iter_mut().zip(words) {
                sums[head] = _mm512_dpbf16_ps(sums[head], words, pair);
            }
        }
    }
    let mut out = [[[0.0; LANES]; H]; B];
    for (out, sum) in out.as_flattened_mut().iter_mut().zip(sums.as_flattened()) {
        // SAFETY: 64 bytes.
        unsafe { _mm512_storeu_ps(out.as_mut_ptr(), *sum) };
    }
    out
}

/// Adds to `out` the `values` of `B` tiles, two positions a word, by `weights` `[H][PART / 2]`, of which word `from` is the first's.
pub(super) fn weighted<const H: usize, const B: usize>(
    values: [&[Words]; B],
    weights: &[[u32; PART / 2]; H],
    from: usize,
    out: &mut [[[f32; LANES]; H]; B],
) {
    assert!(values.iter().all(|values| from + values.len() <= PART / 2));
    assert!(values.iter().all(|one| one.len() == values[0].len()));
    // SAFETY: `InstructionSet::available` has seen that the machine has them, and there is a weight for each word.
    unsafe { weighted_inner(values, weights, from, out) };
}

/// # Safety
/// The machine has the instructions; all `values` are as many, and there are weights for them from `from` on.
#[target_feature(enable = "avx512f,avx512bf16")]
unsafe fn weighted_inner<const H: usize, const B: usize>(
    values: [&[Words]; B],
    weights: &[[u32; PART / 2]; H],
    from: usize,
    out: &mut [[[f32; LANES]; H]; B],
) {
    let mut sums = [[_mm512_setzero_ps(); H]; B];
    for (sum, out) in sums.as_flattened_mut().iter_mut().zip(out.as_flattened()) {
        // SAFETY: 64 bytes.
        *sum = unsafe { _mm512_loadu_ps(out.as_ptr()) };
    }
    for at in 0..values[0].len() {
        let mut words = [pairs_of(_mm512_setzero_si512()); B];
        for (words, values) in words.iter_mut().zip(values) {
            // SAFETY: all have so many words.
            *words = unsafe { load(values, at) };
        }
        for head in 0..H {
            // SAFETY: as the caller says.
            let pair = unsafe { *weights[head].get_unchecked(from + at) };
            let pair = pairs_of(_mm512_set1_epi32(pair as i32));
            for (sums, words) in sums.iter_mut().zip(words) {
                sums[head] = _mm512_dpbf16_ps(sums[head], words, pair);
            }
        }
    }
    for (out, sum) in out.as_flattened_mut().iter_mut().zip(sums.as_flattened()) {
        // SAFETY: 64 bytes.
        unsafe { _mm512_storeu_ps(out.as_mut_ptr(), *sum) };
    }
}

/// # Safety
/// There are more than `at` words.
#[target_feature(enable = "avx512f")]
unsafe fn load(words: &[Words], at: usize) -> __m512bh {
    // SAFETY: as the caller says.
    let words = unsafe { words.get_unchecked(at) };
    // SAFETY: 64 bytes.
    pairs_of(unsafe { _mm512_loadu_si512(words.as_ptr().cast()) })
}
