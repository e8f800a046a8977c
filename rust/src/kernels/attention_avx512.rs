//! Attention's sums of products with AVX-512 BF16.
#![expect(unsafe_code, reason = "instructions that not every machine has")]

use std::arch::x86_64::{
    __m512bh, _mm512_dpbf16_ps, _mm512_loadu_ps, _mm512_loadu_si512, _mm512_setzero_ps,
    _mm512_setzero_si512, _mm512_storeu_ps,
};

use half::bf16;

use super::{
    attention::Words,
    attention_lanes::Lanes,
    pairs_avx512::{pair_at, pairs_of},
};

/// Adds to `out` the products of `B` times sixteen lanes of words with values of `by` `[H, stride]` from `from` on. With sixteen sums
/// at once none waits for its own last addition.
pub(super) fn add_products<const H: usize, const B: usize>(
    words: [&[Words]; B],
    (by, stride, from): (&[bf16], usize, usize),
    out: &mut [[Lanes; H]; B],
) {
    let count = words[0].len();
    assert!(words.iter().all(|words| words.len() == count));
    assert!(from + 2 * count <= stride && by.len() == H * stride);
    // SAFETY: `InstructionSet::available` has seen that the machine has them, and the lengths fit each other.
    unsafe { inner(words, (by, stride, from), out) };
}

/// # Safety
/// The machine has the instructions; all of `words` are as many, and each row of `by` has two values a word from `from` on.
#[target_feature(enable = "avx512f,avx512bf16")]
unsafe fn inner<const H: usize, const B: usize>(
    words: [&[Words]; B],
    (by, stride, from): (&[bf16], usize, usize),
    out: &mut [[Lanes; H]; B],
) {
    let mut sums = [[_mm512_setzero_ps(); H]; B];
    for (sum, out) in sums.as_flattened_mut().iter_mut().zip(out.as_flattened()) {
        // SAFETY: 64 bytes.
        *sum = unsafe { _mm512_loadu_ps(out.as_ptr()) };
    }
    let by = by.as_ptr();
    for at in 0..words[0].len() {
        let mut pairs = [pairs_of(_mm512_setzero_si512()); B];
        for (pairs, words) in pairs.iter_mut().zip(words) {
            // SAFETY: all have so many words.
            *pairs = unsafe { load(words, at) };
        }
        for head in 0..H {
            // SAFETY: as the caller says.
            let pair = unsafe { pair_at(by, head * stride + from + 2 * at) };
            for (sums, pairs) in sums.iter_mut().zip(pairs) {
                sums[head] = _mm512_dpbf16_ps(sums[head], pairs, pair);
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
