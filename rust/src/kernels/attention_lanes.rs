//! The arithmetic of attention in plain Rust over lanes, which the compiler makes vectors of.

use half::bf16;

use super::{
    InstructionSet,
    attention::{LANES, PART, TILE},
    for_each_set, multiply_add,
    vector::{exp, total, widened},
};

/// [`scores_into`] a new array; the macro that writes it knows no parameters of a type.
pub(super) fn scores_of<const H: usize>(
    set: InstructionSet,
    keys: &[[u32; LANES]],
    q: &[f32],
) -> [[f32; LANES]; H] {
    let mut out = [[0.0; LANES]; H];
    scores_into(set, keys, q, out.as_flattened_mut());
    out
}

/// [`weighted_into`] a new array.
pub(super) fn weighted<const H: usize>(
    set: InstructionSet,
    values: &[[bf16; TILE]],
    weights: &[[f32; PART]; H],
    from: usize,
) -> [[f32; TILE]; H] {
    let mut out = [[0.0; TILE]; H];
    weighted_into(set, values, weights.as_flattened(), from, out.as_flattened_mut());
    out
}

for_each_set! {
    /// Products of 16 positions' keys with each head's query: `q` `[heads, head_dim]` → `out` `[heads, LANES]`.
    fn scores_into(keys: &[[u32; LANES]], q: &[f32], out: &mut [f32]) = scores_inner
}

for_each_set! {
    /// Values by weights: `values` of positions in a row, `weights` `[heads, PART]` of which position `from` is the first's →
    /// `out` `[heads, TILE]`.
    fn weighted_into(values: &[[bf16; TILE]], weights: &[f32], from: usize, out: &mut [f32]) = weighted_inner
}

for_each_set! {
    /// The largest score and the sum of exp(score - largest), which scores become.
    pub(super) fn exponentials(scores: &mut [f32]) -> (f32, f32) = exponentials_inner
}

for_each_set! {
    /// `x = x · own + other · others`.
    pub(super) fn add_scaled(x: &mut [f32], own: f32, other: &[f32], others: f32) = add_scaled_inner
}

#[expect(clippy::inline_always, reason = "compiled anew for the instructions of each caller")]
#[inline(always)]
fn scores_inner<const FUSED: bool>(keys: &[[u32; LANES]], q: &[f32], out: &mut [f32]) {
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
    keys: &[[u32; LANES]],
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
    values: &[[bf16; TILE]],
    weights: &[f32],
    from: usize,
    out: &mut [f32],
) {
    let (out, _) = out.as_chunks_mut::<TILE>();
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
    values: &[[bf16; TILE]],
    weights: &[f32],
    from: usize,
    out: &mut [[f32; TILE]],
) {
    let weights: [_; H] =
        std::array::from_fn(|head| &weights[head * PART + from..][..values.len()]);
    let mut sums = [[0.0; TILE]; H];
    for (at, values) in values.iter().enumerate() {
        let values = values.map(widened);
        for (sums, weights) in sums.iter_mut().zip(&weights) {
            let weight = weights[at];
            for lane in 0..TILE {
                sums[lane] = multiply_add::<FUSED>(values[lane], weight, sums[lane]);
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
            block[lane] = exp::<FUSED>(block[lane] - max);
            sums[lane] += block[lane];
        }
    }
    for (score, sum) in rest.iter_mut().zip(&mut sums) {
        *score = exp::<FUSED>(*score - max);
        *sum += *score;
    }
    (max, total(sums))
}

#[expect(clippy::inline_always, reason = "compiled anew for the instructions of each caller")]
#[inline(always)]
fn add_scaled_inner<const FUSED: bool>(x: &mut [f32], own: f32, other: &[f32], others: f32) {
    for (x, &other) in x.iter_mut().zip(other) {
        *x = multiply_add::<FUSED>(*x, own, other * others);
    }
}
