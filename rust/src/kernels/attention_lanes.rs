//! The arithmetic of attention in plain Rust over lanes, which the compiler makes vectors of.

use std::ops::Range;

use half::bf16;

use super::{
    InstructionSet,
    attention::{LANES, PART, Words},
    for_each_set, multiply_add,
    vector::{exp, rounded, total, widened},
};

/// A sum for each lane.
pub(super) type Lanes = [f32; LANES];

/// What words of pairs are multiplied with: for each head a row of `stride` values.
#[derive(Clone, Copy)]
pub(super) struct By<'a> {
    pub(super) narrow: &'a [bf16],
    /// In float32, for instructions that multiply nothing else.
    pub(super) wide: &'a [f32],
    pub(super) stride: usize,
}

/// Adds to `out` the products of `B` times sixteen lanes of words with each of `H` heads' values from `from` on.
fn add_products<const H: usize, const B: usize>(
    set: InstructionSet,
    words: [&[Words]; B],
    (by, from): (By<'_>, usize),
    out: &mut [[Lanes; H]; B],
) {
    match set {
        #[cfg(target_arch = "x86_64")]
        InstructionSet::Avx512Bf16 => {
            super::attention_avx512::add_products(words, (by.narrow, by.stride, from), out);
        }
        _ => {
            for (words, out) in words.iter().zip(out) {
                add_wide(set, words, by.wide, by.stride, from, out.as_flattened_mut());
            }
        }
    }
}

/// Products of two blocks' keys with each head's query.
pub(super) fn scores_of<const H: usize>(
    set: InstructionSet,
    keys: [&[Words]; 2],
    queries: By<'_>,
) -> [[Lanes; H]; 2] {
    let mut out = [[[0.0; LANES]; H]; 2];
    add_products(set, keys, (queries, 0), &mut out);
    out
}

/// By what the values of a part's positions are multiplied, for `H` heads.
pub(super) struct Weights<'a, const H: usize> {
    wide: &'a [[f32; PART]; H],
    narrow: [[bf16; PART]; H],
    rows: Range<usize>,
}

impl<'a, const H: usize> Weights<'a, H> {
    /// `wide` is seen at `rows`, where it has values of bfloat16.
    pub(super) fn new(wide: &'a [[f32; PART]; H], rows: Range<usize>) -> Self {
        let narrow = wide.map(|wide| wide.map(|w| bf16::from_bits((w.to_bits() >> 16) as u16)));
        Self { wide, narrow, rows }
    }

    /// The values of `B` tiles, `[PART / 2][LANES]` each, by these weights, summed up over positions. What is not seen may be
    /// anything, so it is not multiplied with zero but left out.
    pub(super) fn sum<const B: usize>(
        &self,
        set: InstructionSet,
        values: [&[Words]; B],
    ) -> [[Lanes; H]; B] {
        let mut out = values.map(|values| self.edges(values));
        let whole = self.rows.start.div_ceil(2)..self.rows.end / 2;
        if !whole.is_empty() {
            let values = values.map(|values| &values[whole.clone()]);
            let (narrow, wide) = (self.narrow.as_flattened(), self.wide.as_flattened());
            let by = By { narrow, wide, stride: PART };
            add_products(set, values, (by, 2 * whole.start), &mut out);
        }
        out
    }

    /// Of the first and the last word only one row may be seen.
    fn edges(&self, values: &[Words]) -> [Lanes; H] {
        let mut out = [[0.0; LANES]; H];
        let Range { start, end } = self.rows;
        let rows = [(start % 2 == 1).then_some(start), (end % 2 == 1).then(|| end - 1)];
        for row in rows.into_iter().flatten() {
            let shift = if row % 2 == 0 { 16 } else { 0 };
            for (out, wide) in out.iter_mut().zip(self.wide) {
                for (out, word) in out.iter_mut().zip(values[row / 2]) {
                    *out += wide[row] * f32::from_bits(word << shift & 0xffff_0000);
                }
            }
        }
        out
    }
}

for_each_set! {
    /// Adds to `out` `[heads, LANES]` the products of `words` with values of `by` `[heads, stride]` from `from` on.
    fn add_wide(words: &[Words], by: &[f32], stride: usize, from: usize, out: &mut [f32]) = add_wide_inner
}

for_each_set! {
    /// The largest score and the sum of exp(score - largest) in bfloat16, which scores become.
    pub(super) fn exponentials(scores: &mut [f32]) -> (f32, f32) = exponentials_inner
}

for_each_set! {
    /// `x = x · own + other · others`.
    pub(super) fn add_scaled(x: &mut [f32], own: f32, other: &[f32], others: f32) = add_scaled_inner
}

#[expect(clippy::inline_always, reason = "compiled anew for the instructions of each caller")]
#[inline(always)]
fn add_wide_inner<const FUSED: bool>(
    words: &[Words],
    by: &[f32],
    stride: usize,
    from: usize,
    out: &mut [f32],
) {
    let (out, _) = out.as_chunks_mut::<LANES>();
    match out.len() {
        8 => add_some::<FUSED, 8>(words, (by, stride, from), out),
        4 => add_some::<FUSED, 4>(words, (by, stride, from), out),
        2 => add_some::<FUSED, 2>(words, (by, stride, from), out),
        _ => add_some::<FUSED, 1>(words, (by, stride, from), out),
    }
}

#[expect(clippy::inline_always, reason = "compiled anew for the instructions of each caller")]
#[inline(always)]
fn add_some<const FUSED: bool, const H: usize>(
    words: &[Words],
    (by, stride, from): (&[f32], usize, usize),
    out: &mut [Lanes],
) {
    let by: [_; H] = std::array::from_fn(|head| &by[head * stride + from..][..2 * words.len()]);
    let mut sums: [_; H] = std::array::from_fn(|head| out[head]);
    for (at, words) in words.iter().enumerate() {
        let low: Lanes = std::array::from_fn(|lane| f32::from_bits(words[lane] << 16));
        let high: Lanes = std::array::from_fn(|lane| f32::from_bits(words[lane] & 0xffff_0000));
        for (sums, by) in sums.iter_mut().zip(&by) {
            let (a, b) = (by[2 * at], by[2 * at + 1]);
            for lane in 0..LANES {
                sums[lane] = multiply_add::<FUSED>(low[lane], a, sums[lane]);
                sums[lane] = multiply_add::<FUSED>(high[lane], b, sums[lane]);
            }
        }
    }
    out.copy_from_slice(&sums);
}

#[expect(clippy::inline_always, reason = "compiled anew for the instructions of each caller")]
#[inline(always)]
fn exponentials_inner<const FUSED: bool>(scores: &mut [f32]) -> (f32, f32) {
    let (blocks, rest) = scores.as_chunks_mut::<LANES>();
    let mut largest = [f32::NEG_INFINITY; LANES];
    for block in &*blocks {
        for lane in 0..LANES {
            largest[lane] = largest[lane].max(block[lane]);
        }
    }
    let max = largest.iter().chain(&*rest).fold(f32::NEG_INFINITY, |max, &score| max.max(score));
    let mut sums = [0.0; LANES];
    for block in blocks {
        for lane in 0..LANES {
            block[lane] = weight::<FUSED>(block[lane] - max);
            sums[lane] += block[lane];
        }
    }
    for (score, sum) in rest.iter_mut().zip(&mut sums) {
        *score = weight::<FUSED>(*score - max);
        *sum += *score;
    }
    (max, total(sums))
}

/// Rounded to bfloat16, as which it multiplies values.
#[expect(clippy::inline_always, reason = "compiled anew for the instructions of each caller")]
#[inline(always)]
fn weight<const FUSED: bool>(score: f32) -> f32 {
    widened(rounded(exp::<FUSED>(score)))
}

#[expect(clippy::inline_always, reason = "compiled anew for the instructions of each caller")]
#[inline(always)]
fn add_scaled_inner<const FUSED: bool>(x: &mut [f32], own: f32, other: &[f32], others: f32) {
    for (x, &other) in x.iter_mut().zip(other) {
        *x = multiply_add::<FUSED>(*x, own, other * others);
    }
}
