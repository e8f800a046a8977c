//! bfloat16 weights times tokens in float32, with AVX-512 for machines without products of bfloat16.
#![expect(unsafe_code, reason = "instructions that not every machine has")]

use std::arch::x86_64::{
    __m512, _mm256_loadu_si256, _mm256_maskz_loadu_epi16, _mm512_add_ps, _mm512_castsi512_ps,
    _mm512_cvtepu16_epi32, _mm512_fmadd_ps, _mm512_loadu_ps, _mm512_maskz_loadu_ps,
    _mm512_reduce_add_ps, _mm512_setzero_ps, _mm512_slli_epi32,
};

use half::bf16;

use super::{
    matrix::{ROWS, Sums},
    prefetch::{AHEAD, prefetch},
};

/// Columns of one register.
const LANES: usize = 16;

/// Registers that a row's columns go to in turn: an addition takes as long as four of them.
const CHAINS: usize = 2;

/// At most sixteen rows of `columns` values × `x` `[tokens, columns]` → `sums` `[tokens]`. A sum is made of the same additions in
/// the same order among any rows and tokens.
pub(super) fn block(values: &[bf16], x: &[f32], columns: usize, sums: &mut [Sums]) {
    let (rows, tokens) = (values.len() / columns, x.len() / columns);
    assert!(rows <= ROWS && values.len() == rows * columns);
    assert!(tokens == sums.len() && x.len() == tokens * columns);
    let mut row = 0;
    while row < rows {
        // With one token a row after the other, which is one stream of memory.
        let some = if rows - row < 2 || tokens == 1 { 1 } else { 2 };
        for token in (0..tokens).step_by(4) {
            let run = match (some, tokens - token) {
                (2, 1) => tile::<2, 1>,
                (2, 2) => tile::<2, 2>,
                (2, 3) => tile::<2, 3>,
                (2, _) => tile::<2, 4>,
                (_, 1) => tile::<1, 1>,
                (_, 2) => tile::<1, 2>,
                (_, 3) => tile::<1, 3>,
                (_, _) => tile::<1, 4>,
            };
            let (values, x) = (&values[row * columns..], &x[token * columns..]);
            // SAFETY: `InstructionSet::available` has seen that the machine has them; rows, tokens and sums are there.
            unsafe { run(values, x, columns, row, &mut sums[token..]) };
        }
        row += some;
    }
}

/// Writes the sums of `R` rows from `row` on with `T` tokens.
///
/// # Safety
/// The machine has the instructions, and there are as many rows, tokens and sums.
#[target_feature(enable = "avx512f,avx512bw,avx512vl")]
unsafe fn tile<const R: usize, const T: usize>(
    values: &[bf16],
    x: &[f32],
    columns: usize,
    row: usize,
    sums: &mut [Sums],
) {
    debug_assert!(values.len() >= R * columns && x.len() >= T * columns && sums.len() >= T);
    let (values, x) = (values.as_ptr(), x.as_ptr());
    let mut chains = [[[_mm512_setzero_ps(); CHAINS]; T]; R];
    let whole = columns / (CHAINS * LANES) * CHAINS * LANES;
    for at in (0..whole).step_by(CHAINS * LANES) {
        if R == 1 && T == 1 {
            prefetch(values.wrapping_add(at).wrapping_byte_add(AHEAD).cast());
        }
        for chain in 0..CHAINS {
            let at = at + chain * LANES;
            let mut weights = [_mm512_setzero_ps(); R];
            for (r, weights) in weights.iter_mut().enumerate() {
                // SAFETY: there are `R` rows, with 16 values from `at` on.
                *weights = unsafe { widened(values.wrapping_add(r * columns + at)) };
            }
            for token in 0..T {
                // SAFETY: as above.
                let x = unsafe { _mm512_loadu_ps(x.wrapping_add(token * columns + at)) };
                for (chains, weights) in chains.iter_mut().zip(weights) {
                    chains[token][chain] = _mm512_fmadd_ps(weights, x, chains[token][chain]);
                }
            }
        }
    }
    for at in (whole..columns).step_by(LANES) {
        let (chain, left) = ((at - whole) / LANES, (columns - at).min(LANES));
        let mask = ((1_u32 << left) - 1) as u16;
        for (r, chains) in chains.iter_mut().enumerate() {
            // SAFETY: `left` values of the row are left.
            let weights = unsafe { widened_some(values.wrapping_add(r * columns + at), mask) };
            for (token, chains) in chains.iter_mut().enumerate() {
                // SAFETY: as above.
                let x =
                    unsafe { _mm512_maskz_loadu_ps(mask, x.wrapping_add(token * columns + at)) };
                chains[chain] = _mm512_fmadd_ps(weights, x, chains[chain]);
            }
        }
    }
    for (r, chains) in chains.iter().enumerate() {
        for ([even, odd], sums) in chains.iter().zip(&mut *sums) {
            sums[row + r] = _mm512_reduce_add_ps(_mm512_add_ps(*even, *odd));
        }
    }
}

/// # Safety
/// 16 values can be read.
#[target_feature(enable = "avx512f")]
unsafe fn widened(values: *const bf16) -> __m512 {
    // SAFETY: as the caller says.
    let values = unsafe { _mm256_loadu_si256(values.cast()) };
    _mm512_castsi512_ps(_mm512_slli_epi32::<16>(_mm512_cvtepu16_epi32(values)))
}

/// # Safety
/// As many values as `mask` has bits can be read.
#[target_feature(enable = "avx512f,avx512bw,avx512vl")]
unsafe fn widened_some(values: *const bf16, mask: u16) -> __m512 {
    // SAFETY: as the caller says.
    let values = unsafe { _mm256_maskz_loadu_epi16(mask, values.cast()) };
    _mm512_castsi512_ps(_mm512_slli_epi32::<16>(_mm512_cvtepu16_epi32(values)))
}
