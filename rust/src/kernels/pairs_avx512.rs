//! What the kernels in AVX-512 BF16 share: pairs of values in registers, 16 of them, and reading ahead.
#![expect(unsafe_code, reason = "instructions that not every machine has")]

use std::arch::x86_64::{__m512bh, __m512i, _MM_HINT_NTA, _mm_prefetch, _mm512_set1_epi32};

use half::bf16;

/// How far ahead of a single token's product memory is asked for: the processor's own prefetching ends at every page of 4 KiB, huge
/// or not. 15 % faster (docs/log.md).
pub(super) const AHEAD: usize = 8192;

/// Asks for the 64 bytes around an address, which may lie beyond what there is.
pub(super) fn prefetch(at: *const i8) {
    // SAFETY: a hint, which reads nothing where there is nothing.
    unsafe { _mm_prefetch::<_MM_HINT_NTA>(at) };
}

/// The values at `place` and after it, in every lane.
///
/// # Safety
/// They can be read.
#[target_feature(enable = "avx512f")]
pub(super) unsafe fn pair_at(x: *const bf16, place: usize) -> __m512bh {
    // SAFETY: as the caller says.
    let x = unsafe { x.add(place) };
    // SAFETY: as the caller says.
    pairs_of(_mm512_set1_epi32(unsafe { x.cast::<i32>().read_unaligned() }))
}

#[target_feature(enable = "avx512f")]
pub(super) fn pairs_of(bits: __m512i) -> __m512bh {
    // SAFETY: both are 512 bits without a meaning of their own.
    unsafe { std::mem::transmute::<__m512i, __m512bh>(bits) }
}
