//! What the kernels in AVX-512 BF16 share: pairs of values in registers, 16 of them.
#![expect(unsafe_code, reason = "instructions that not every machine has")]

use std::arch::x86_64::{__m512bh, __m512i, _mm512_set1_epi32};

use half::bf16;

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
