//! The arithmetic of attention in plain Rust over lanes, which the compiler makes vectors of.

use std::ops::Range;

use super::{
    InstructionSet,
    attention::{Heads, LANES, PART, Words},
    for_each_set, multiply_add,
    vector::{exp, rounded, total, widened},
};

type Lanes = [f32; LANES];

/// Products of two blocks' keys with each head's query.
pub(super) fn scores_of<const H: usize>(
    set: InstructionSet,
    keys: [&[Words]; 2],
    heads: &Heads<'_>,
) -> [[[f32; LANES]; H]; 2] {
    match set {
        #[cfg(target_arch = "x86_64")]
        InstructionSet::Avx512Bf16 => super::attention_avx512::scores(keys, heads.narrow),
        _ => keys.map(|keys| {
            let mut out = [[0.0; LANES]; H];
            scores_into(set, keys, heads.wide, out.as_flattened_mut());
            out
        }),
    }
}

/// By what the values of a part's positions are multiplied, for `H` heads: zero for those that are not seen.
pub(super) struct Weights<'a, const H: usize> {
    wide: &'a [[f32; PART]; H],
    /// Pairs of bfloat16, for instructions that multiply them.
    pairs: [[u32; PART / 2]; H],
    rows: Range<usize>,
}

impl<'a, const H: usize> Weights<'a, H> {
    /// `wide` is seen at `rows`, where it has values of bfloat16.
    pub(super) fn new(wide: &'a [[f32; PART]; H], rows: Range<usize>, set: InstructionSet) -> Self {
        let mut pairs = [[0; PART / 2]; H];
        if set == InstructionSet::Avx512Bf16 {
            for (pairs, wide) in pairs.iter_mut().zip(wide) {
                for (pair, [low, high]) in pairs.iter_mut().zip(wide.as_chunks::<2>().0) {
                    *pair = low.to_bits() >> 16 | high.to_bits() & 0xffff_0000;
                }
            }
        }
        Self { wide, pairs, rows }
    }

    /// The values of `B` tiles, `[PART / 2][LANES]` each, by these weights, summed up over positions. What is not seen may be
    /// anything, so it is not multiplied with zero but left out.
    pub(super) fn sum<const B: usize>(
        &self,
        set: InstructionSet,
        values: [&[Words]; B],
    ) -> [[[f32; LANES]; H]; B] {
        let mut out = values.map(|values| self.edges(values));
        let whole = self.rows.start.div_ceil(2)..self.rows.end / 2;
        if whole.is_empty() {
            return out;
        }
        let values = values.map(|values| &values[whole.clone()]);
        match set {
            #[cfg(target_arch = "x86_64")]
            InstructionSet::Avx512Bf16 => {
                super::attention_avx512::weighted(values, &self.pairs, whole.start, &mut out);
            }
            _ => {
                let (weights, from) = (self.wide.as_flattened(), 2 * whole.start);
                for (values, out) in values.iter().zip(&mut out) {
                    weighted_into(set, values, weights, from, out.as_flattened_mut());
                }
            }
        }
        out
    }

    /// Of the first and the last word only one row may be seen.
    fn edges(&self, values: &[Words]) -> [[f32; LANES]; H] {
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
    /// Products of 16 positions' keys with each head's query: `q` `[heads, head_dim]` → `out` `[heads, LANES]`.
    fn scores_into(keys: &[Words], q: &[f32], out: &mut [f32]) = scores_inner
}

for_each_set! {
    /// Values by weights: `values` of two rows a word, `weights` `[heads, PART]` of which row `from` is the first's, added to
    /// `out` `[heads, LANES]`.
    fn weighted_into(values: &[Words], weights: &[f32], from: usize, out: &mut [f32]) = weighted_inner
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
fn scores_inner<const FUSED: bool>(keys: &[Words], q: &[f32], out: &mut [f32]) {
    let (out, _) = out.as_chunks_mut::<LANES>();
    match out.len() {
        8 => scores_some::<FUSED, 8>(keys, q, out),
        4 => scores_some::<FUSED, 4>(keys, q, out),
        2 => scores_some::<FUSED, 2>(keys, q, out),
        _ => scores_some::<FUSED, 1>(keys, q, out),
    }
}

#[expect(clippy::inline_always, reason = "compiled anew for the instructions of each caller")]
#[inline(always)]
fn scores_some<const FUSED: bool, const H: usize>(
    keys: &[Words],
    q: &[f32],
    out: &mut [[f32; LANES]],
) {
    let dim = 2 * keys.len();
    let q: [_; H] = std::array::from_fn(|head| &q[head * dim..(head + 1) * dim]);
    let mut sums = [[0.0; LANES]; H];
    for (at, words) in keys.iter().enumerate() {
        let low: [f32; LANES] = std::array::from_fn(|lane| f32::from_bits(words[lane] << 16));
        let high: [f32; LANES] =
            std::array::from_fn(|lane| f32::from_bits(words[lane] & 0xffff_0000));
        for (sums, q) in sums.iter_mut().zip(&q) {
            let (a, b) = (q[2 * at], q[2 * at + 1]);
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
fn weighted_inner<const FUSED: bool>(
    values: &[Words],
    weights: &[f32],
    from: usize,
    out: &mut [f32],
) {
    let (out, _) = out.as_chunks_mut::<LANES>();
    match out.len() {
        8 => weighted_some::<FUSED, 8>(values, weights, from, out),
        4 => weighted_some::<FUSED, 4>(values, weights, from, out),
        2 => weighted_some::<FUSED, 2>(values, weights, from, out),
        _ => weighted_some::<FUSED, 1>(values, weights, from, out),
    }
}

#[expect(clippy::inline_always, reason = "compiled anew for the instructions of each caller")]
#[inline(always)]
fn weighted_some<const FUSED: bool, const H: usize>(
    values: &[Words],
    weights: &[f32],
    from: usize,
    out: &mut [[f32; LANES]],
) {
    let weights: [_; H] =
        std::array::from_fn(|head| &weights[head * PART + from..][..2 * values.len()]);
    let mut sums: [_; H] = std::array::from_fn(|head| out[head]);
    for (at, words) in values.iter().enumerate() {
        let low: Lanes = std::array::from_fn(|lane| f32::from_bits(words[lane] << 16));
        let high: Lanes = std::array::from_fn(|lane| f32::from_bits(words[lane] & 0xffff_0000));
        for (sums, weights) in sums.iter_mut().zip(&weights) {
            let (a, b) = (weights[2 * at], weights[2 * at + 1]);
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
