//! bfloat16 products with AVX-512 BF16.
#![expect(unsafe_code, reason = "instructions that not every machine has")]

use std::arch::x86_64::{
    __m512bh, _mm512_dpbf16_ps, _mm512_loadu_si512, _mm512_maskz_loadu_epi16, _mm512_reduce_add_ps,
    _mm512_setzero_ps, _mm512_setzero_si512,
};

use half::bf16;

use super::{
    matrix::{ROWS, Sums},
    pairs_avx512::pairs_of,
    prefetch::{AHEAD, prefetch},
};

/// Columns of one instruction.
const COLUMNS: usize = 32;

/// At most sixteen rows of `columns` values × `x` `[tokens, columns]` → `sums` `[tokens]`. A sum is made of the same additions in
/// the same order among any rows and tokens.
pub(super) fn block(values: &[bf16], x: &[bf16], columns: usize, sums: &mut [Sums]) {
    let (rows, tokens) = (values.len() / columns, x.len() / columns);
    assert!(rows <= ROWS && values.len() == rows * columns);
    assert!(tokens == sums.len() && x.len() == tokens * columns);
    let mut row = 0;
    while row < rows {
        // With one token a row after the other, which is one stream of memory.
        let some = if rows - row < 4 || tokens == 1 { 1 } else { 4 };
        for token in (0..tokens).step_by(4) {
            let run = match (some, tokens - token) {
                (4, 1) => tile::<4, 1>,
                (4, 2) => tile::<4, 2>,
                (4, 3) => tile::<4, 3>,
                (4, _) => tile::<4, 4>,
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
#[target_feature(enable = "avx512f,avx512bw,avx512bf16")]
unsafe fn tile<const R: usize, const T: usize>(
    values: &[bf16],
    x: &[bf16],
    columns: usize,
    row: usize,
    sums: &mut [Sums],
) {
    debug_assert!(values.len() >= R * columns && x.len() >= T * columns && sums.len() >= T);
    let (values, x) = (values.as_ptr(), x.as_ptr());
    let mut chains = [[_mm512_setzero_ps(); T]; R];
    let whole = columns / COLUMNS * COLUMNS;
    for at in (0..whole).step_by(COLUMNS) {
        if R == 1 && T == 1 {
            prefetch(values.wrapping_add(at).wrapping_byte_add(AHEAD).cast());
        }
        let mut weights = [none(); R];
        for (r, weights) in weights.iter_mut().enumerate() {
            // SAFETY: there are `R` rows, with 32 values from `at` on.
            *weights = unsafe { load(values, r * columns + at) };
        }
        for token in 0..T {
            // SAFETY: as above.
            let x = unsafe { load(x, token * columns + at) };
            for (chains, weights) in chains.iter_mut().zip(weights) {
                chains[token] = _mm512_dpbf16_ps(chains[token], weights, x);
            }
        }
    }
    let left = columns - whole;
    if left > 0 {
        for (r, chains) in chains.iter_mut().enumerate() {
            // SAFETY: `left` values of the row are left.
            let weights = unsafe { load_some(values, r * columns + whole, left) };
            for (token, chain) in chains.iter_mut().enumerate() {
                // SAFETY: as above.
                let x = unsafe { load_some(x, token * columns + whole, left) };
                *chain = _mm512_dpbf16_ps(*chain, weights, x);
            }
        }
    }
    for (r, chains) in chains.iter().enumerate() {
        for (chain, sums) in chains.iter().zip(&mut *sums) {
            sums[row + r] = _mm512_reduce_add_ps(*chain);
        }
    }
}

/// # Safety
/// 32 values from `place` on can be read.
#[target_feature(enable = "avx512f")]
unsafe fn load(values: *const bf16, place: usize) -> __m512bh {
    // SAFETY: as the caller says.
    let values = unsafe { values.add(place) };
    // SAFETY: as the caller says.
    pairs_of(unsafe { _mm512_loadu_si512(values.cast()) })
}

/// # Safety
/// `count` values, less than 32, from `place` on can be read.
#[target_feature(enable = "avx512f,avx512bw")]
unsafe fn load_some(values: *const bf16, place: usize, count: usize) -> __m512bh {
    // SAFETY: as the caller says.
    let values = unsafe { values.add(place) };
    // SAFETY: the mask has as many bits as the caller has values.
    pairs_of(unsafe { _mm512_maskz_loadu_epi16((1 << count) - 1, values.cast()) })
}

#[target_feature(enable = "avx512f")]
fn none() -> __m512bh {
    pairs_of(_mm512_setzero_si512())
}
