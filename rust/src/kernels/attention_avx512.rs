//! Scores with AVX-512 BF16.
#![expect(unsafe_code, reason = "instructions that not every machine has")]

use std::arch::x86_64::{
    _mm512_dpbf16_ps, _mm512_loadu_si512, _mm512_setzero_ps, _mm512_storeu_ps,
};

use half::bf16;

use super::{
    attention::LANES,
    pairs_avx512::{pair_at, pairs_of},
};

/// Products of 16 positions' keys `[head_dim / 2]` with each head's query: `q` `[H, head_dim]`.
pub(super) fn scores<const H: usize>(keys: &[[u32; LANES]], q: &[bf16]) -> [[f32; LANES]; H] {
    assert!(q.len() == H * 2 * keys.len());
    // SAFETY: `InstructionSet::available` has seen that the machine has them, and the lengths fit each other.
    unsafe { inner(keys, q) }
}

/// # Safety
/// The machine has the instructions; `q` has `H` heads of two values a word of `keys`.
#[target_feature(enable = "avx512f,avx512bf16")]
unsafe fn inner<const H: usize>(keys: &[[u32; LANES]], q: &[bf16]) -> [[f32; LANES]; H] {
    let mut sums = [_mm512_setzero_ps(); H];
    let q = q.as_ptr();
    for (at, words) in keys.iter().enumerate() {
        // SAFETY: 64 bytes.
        let words = pairs_of(unsafe { _mm512_loadu_si512(words.as_ptr().cast()) });
        for (head, sum) in sums.iter_mut().enumerate() {
            // SAFETY: the head's query has two values a word.
            let pair = unsafe { pair_at(q, 2 * (head * keys.len() + at)) };
            *sum = _mm512_dpbf16_ps(*sum, words, pair);
        }
    }
    let mut out = [[0.0; LANES]; H];
    for (out, sum) in out.iter_mut().zip(sums) {
        // SAFETY: 64 bytes.
        unsafe { _mm512_storeu_ps(out.as_mut_ptr(), sum) };
    }
    out
}
