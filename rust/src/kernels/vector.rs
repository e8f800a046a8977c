//! What happens to one token's vector between two products: norms, rotation, GELU. All in float32.

use half::bf16;

use super::{for_each_set, multiply_add};

const SQRT_2_OVER_PI: f32 = 0.797_884_6;

/// Sums go along as many lanes as the widest registers have, on every instruction set.
const LANES: usize = 16;

for_each_set! {
    /// RMS norm (gemma4.md 2.1) of `x`, rounded: `out = x / sqrt(mean(x²) + eps) · weight`.
    pub(crate) fn norm(x: &[f32], weight: Option<&[f32]>, eps: f32, out: &mut [bf16]) = norm_inner
}

for_each_set! {
    /// `x` rounded.
    pub(crate) fn narrow(x: &[f32], out: &mut [bf16]) = narrow_inner
}

for_each_set! {
    /// The same of `x` in place.
    pub(crate) fn norm_in_place(x: &mut [f32], weight: &[f32], eps: f32) = norm_in_place_inner
}

for_each_set! {
    /// `h = (h + norm(x)) · scale`.
    pub(crate) fn add_normed(h: &mut [f32], x: &[f32], weight: &[f32], eps: f32, scale: f32) = add_normed_inner
}

for_each_set! {
    /// `x = (x + added · factor) · scale`.
    pub(crate) fn scale_add(x: &mut [f32], added: &[bf16], factor: f32, scale: f32) = scale_add_inner
}

for_each_set! {
    /// A head's norm, and then its rotation by angles of which `turn` has cosine and sine, one for each
    /// pair `(j, j + len / 2)`.
    pub(crate) fn norm_and_rotate(x: &[f32], weight: &[f32], eps: f32, turn: (&[f32], &[f32]), out: &mut [bf16]) = norm_and_rotate_inner
}

for_each_set! {
    /// `out = gelu(gate) · up`, with GELU by its tanh formula (`gelu_pytorch_tanh`).
    pub(crate) fn gelu_times(gate: &[f32], up: &[f32], out: &mut [bf16]) = gelu_times_inner
}

/// `1 / sqrt(mean(x²) + eps)`.
#[expect(clippy::inline_always, reason = "compiled anew for the instructions of each caller")]
#[inline(always)]
fn factor<const FUSED: bool>(x: &[f32], eps: f32) -> f32 {
    let mut sums = [0.0; LANES];
    let (blocks, rest) = x.as_chunks::<LANES>();
    for block in blocks {
        for lane in 0..LANES {
            sums[lane] = multiply_add::<FUSED>(block[lane], block[lane], sums[lane]);
        }
    }
    for (sum, &x) in sums.iter_mut().zip(rest) {
        *sum += x * x;
    }
    1.0 / (total(sums) / x.len() as f32 + eps).sqrt()
}

/// The sum of all lanes, in halves.
#[expect(clippy::inline_always, reason = "compiled anew for the instructions of each caller")]
#[inline(always)]
pub(super) fn total(mut lanes: [f32; LANES]) -> f32 {
    let mut width = LANES / 2;
    while width > 0 {
        for lane in 0..width {
            lanes[lane] += lanes[lane + width];
        }
        width /= 2;
    }
    lanes[0]
}

#[expect(clippy::inline_always, reason = "compiled anew for the instructions of each caller")]
#[inline(always)]
fn norm_inner<const FUSED: bool>(x: &[f32], weight: Option<&[f32]>, eps: f32, out: &mut [bf16]) {
    assert_eq!((out.len(), weight.map_or(x.len(), <[f32]>::len)), (x.len(), x.len()));
    let factor = factor::<FUSED>(x, eps);
    match weight {
        Some(weight) => {
            for ((out, &x), &weight) in out.iter_mut().zip(x).zip(weight) {
                *out = rounded(x * factor * weight);
            }
        }
        None => {
            for (out, &x) in out.iter_mut().zip(x) {
                *out = rounded(x * factor);
            }
        }
    }
}

#[expect(clippy::inline_always, reason = "compiled anew for the instructions of each caller")]
#[inline(always)]
fn narrow_inner<const FUSED: bool>(x: &[f32], out: &mut [bf16]) {
    assert_eq!(out.len(), x.len());
    for (out, &x) in out.iter_mut().zip(x) {
        *out = rounded(x);
    }
}

#[expect(clippy::inline_always, reason = "compiled anew for the instructions of each caller")]
#[inline(always)]
fn norm_in_place_inner<const FUSED: bool>(x: &mut [f32], weight: &[f32], eps: f32) {
    assert_eq!(weight.len(), x.len());
    let factor = factor::<FUSED>(x, eps);
    for (x, &weight) in x.iter_mut().zip(weight) {
        *x *= factor * weight;
    }
}

#[expect(clippy::inline_always, reason = "compiled anew for the instructions of each caller")]
#[inline(always)]
fn add_normed_inner<const FUSED: bool>(
    h: &mut [f32],
    x: &[f32],
    weight: &[f32],
    eps: f32,
    scale: f32,
) {
    assert_eq!((x.len(), weight.len()), (h.len(), h.len()));
    let factor = factor::<FUSED>(x, eps);
    for ((h, &x), &weight) in h.iter_mut().zip(x).zip(weight) {
        *h = multiply_add::<FUSED>(x * factor, weight, *h) * scale;
    }
}

#[expect(clippy::inline_always, reason = "compiled anew for the instructions of each caller")]
#[inline(always)]
fn scale_add_inner<const FUSED: bool>(x: &mut [f32], added: &[bf16], factor: f32, scale: f32) {
    assert_eq!(added.len(), x.len());
    for (x, &added) in x.iter_mut().zip(added) {
        *x = multiply_add::<FUSED>(widened(added), factor, *x) * scale;
    }
}

#[expect(clippy::inline_always, reason = "compiled anew for the instructions of each caller")]
#[inline(always)]
fn norm_and_rotate_inner<const FUSED: bool>(
    x: &[f32],
    weight: &[f32],
    eps: f32,
    (cos, sin): (&[f32], &[f32]),
    out: &mut [bf16],
) {
    assert_eq!((weight.len(), out.len()), (x.len(), x.len()));
    assert_eq!((2 * cos.len(), 2 * sin.len()), (x.len(), x.len()));
    let factor = factor::<FUSED>(x, eps);
    let half = x.len() / 2;
    let ((first, second), (w_first, w_second)) = (x.split_at(half), weight.split_at(half));
    let (out_first, out_second) = out.split_at_mut(half);
    for j in 0..half {
        let (a, b) = (first[j] * factor * w_first[j], second[j] * factor * w_second[j]);
        out_first[j] = rounded(multiply_add::<FUSED>(a, cos[j], -(b * sin[j])));
        out_second[j] = rounded(multiply_add::<FUSED>(b, cos[j], a * sin[j]));
    }
}

#[expect(clippy::inline_always, reason = "compiled anew for the instructions of each caller")]
#[inline(always)]
fn gelu_times_inner<const FUSED: bool>(gate: &[f32], up: &[f32], out: &mut [bf16]) {
    assert_eq!((gate.len(), up.len()), (out.len(), out.len()));
    for ((out, &x), &up) in out.iter_mut().zip(gate).zip(up) {
        let inner = SQRT_2_OVER_PI * multiply_add::<FUSED>(0.044_715 * x * x, x, x);
        // 0.5 · (1 + tanh(a)) = 1 / (1 + exp(-2a))
        *out = rounded(x / (1.0 + exp::<FUSED>(-2.0 * inner)) * up);
    }
}

/// e to the power of `x`, to some 2e-7 of it; below -87 and above 88 as there.
#[inline(always)]
pub(super) fn exp<const FUSED: bool>(x: f32) -> f32 {
    // ln 2 in two parts, so that the product with a whole number loses nothing (Cody and Waite).
    const LN_2_HIGH: f32 = 0.693_359_4;
    const LN_2_LOW: f32 = -2.121_944_4e-4;
    // Adding and taking away 1.5 · 2^23 rounds to a whole number, which then stands in the lowest bits.
    const ROUND: f32 = 12_582_912.0;
    let x = x.clamp(-87.0, 88.0);
    let shifted = multiply_add::<FUSED>(x, std::f32::consts::LOG2_E, ROUND);
    let whole = shifted - ROUND;
    let rest = multiply_add::<FUSED>(whole, -LN_2_HIGH, x);
    let rest = multiply_add::<FUSED>(whole, -LN_2_LOW, rest);
    // Taylor's series, ending at the seventh power, for |rest| < 0.35.
    let mut sum = 1.0 / 5040.0;
    for term in [1.0 / 720.0, 1.0 / 120.0, 1.0 / 24.0, 1.0 / 6.0, 0.5, 1.0, 1.0] {
        sum = multiply_add::<FUSED>(sum, rest, term);
    }
    let power = (shifted.to_bits() as i32).wrapping_sub(ROUND.to_bits() as i32).wrapping_add(127);
    sum * f32::from_bits((power as u32) << 23)
}

#[expect(clippy::inline_always, reason = "compiled anew for the instructions of each caller")]
#[inline(always)]
pub(super) fn widened(value: bf16) -> f32 {
    f32::from_bits(u32::from(value.to_bits()) << 16)
}

/// To the nearest, of two as near to the even one. Written out, since `half` asks for each value whether it is a number, which no vector
/// can; what is no number stays none.
#[expect(clippy::inline_always, reason = "compiled anew for the instructions of each caller")]
#[inline(always)]
pub(super) fn rounded(value: f32) -> bf16 {
    let bits = value.to_bits();
    let near = bits.wrapping_add(0x7fff + (bits >> 16 & 1)) >> 16;
    let none = bits >> 16 | 0x40;
    bf16::from_bits(if value.is_nan() { none } else { near } as u16)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kernels::InstructionSet;

    fn values(len: usize, seed: usize) -> Vec<f32> {
        (0..len).map(|i| ((i * 37 + seed * 61) % 113) as f32 / 30.0 - 1.9).collect()
    }

    fn normed(x: &[f32], weight: &[f32]) -> Vec<f64> {
        let mean = x.iter().map(|&x| f64::from(x).powi(2)).sum::<f64>() / x.len() as f64;
        x.iter()
            .zip(weight)
            .map(|(&x, &w)| f64::from(x) * f64::from(w) / (mean + 1e-6).sqrt())
            .collect()
    }

    fn assert_near(
        set: InstructionSet,
        found: impl IntoIterator<Item = f64>,
        wanted: &[f64],
        bar: f64,
    ) {
        for (found, &wanted) in found.into_iter().zip(wanted) {
            assert!(
                (found - wanted).abs() <= bar * wanted.abs().max(0.05),
                "{set:?} {found} {wanted}"
            );
        }
    }

    #[test]
    fn norms_are_those_of_float64_on_every_instruction_set() {
        for set in InstructionSet::available() {
            for len in [2, 30, 64, 1536] {
                let (x, weight) = (values(len, 1), values(len, 2));
                let wanted = normed(&x, &weight);
                let mut out = vec![bf16::NAN; len];
                norm(set, &x, Some(&weight), 1e-6, &mut out);
                assert_near(set, out.iter().map(|v| v.to_f64()), &wanted, 1.0 / 256.0);
                norm(set, &x, None, 1e-6, &mut out);
                let plain = normed(&x, &vec![1.0; len]);
                assert_near(set, out.iter().map(|v| v.to_f64()), &plain, 1.0 / 256.0);
                let mut own = x.clone();
                norm_in_place(set, &mut own, &weight, 1e-6);
                assert_near(set, own.iter().map(|&v| f64::from(v)), &wanted, 1e-5);
                let mut h = values(len, 3);
                let sum: Vec<_> =
                    h.iter().zip(&wanted).map(|(&h, w)| (f64::from(h) + w) * 0.25).collect();
                add_normed(set, &mut h, &x, &weight, 1e-6, 0.25);
                assert_near(set, h.iter().map(|&v| f64::from(v)), &sum, 1e-5);
            }
        }
    }

    #[test]
    fn a_head_is_turned_in_pairs_half_a_head_apart() {
        for set in InstructionSet::available() {
            for len in [2, 48, 256] {
                let (x, weight, half) = (values(len, 4), values(len, 5), len / 2);
                let angle = |j: usize| j as f64 * 0.7;
                let cos: Vec<_> = (0..half).map(|j| angle(j).cos() as f32).collect();
                let sin: Vec<_> = (0..half).map(|j| angle(j).sin() as f32).collect();
                let x_normed = normed(&x, &weight);
                let wanted: Vec<_> = (0..len)
                    .map(|i| {
                        let (a, b) = (x_normed[i % half], x_normed[i % half + half]);
                        let (sin, cos) = angle(i % half).sin_cos();
                        if i < half { a * cos - b * sin } else { b * cos + a * sin }
                    })
                    .collect();
                let mut out = vec![bf16::NAN; len];
                norm_and_rotate(set, &x, &weight, 1e-6, (&cos, &sin), &mut out);
                assert_near(set, out.iter().map(|v| v.to_f64()), &wanted, 1.0 / 200.0);
            }
        }
    }

    #[test]
    fn gelu_is_its_tanh_formula() {
        for set in InstructionSet::available() {
            let gate: Vec<_> = (-400..400).map(|i| i as f32 / 20.0).collect();
            let up = values(gate.len(), 6);
            let wanted: Vec<_> = gate
                .iter()
                .zip(&up)
                .map(|(&x, &up)| {
                    let x = f64::from(x);
                    let inner = (2.0 / std::f64::consts::PI).sqrt() * (x + 0.044_715 * x.powi(3));
                    0.5 * x * (1.0 + inner.tanh()) * f64::from(up)
                })
                .collect();
            let mut out = vec![bf16::NAN; gate.len()];
            gelu_times(set, &gate, &up, &mut out);
            assert_near(set, out.iter().map(|v| v.to_f64()), &wanted, 1.0 / 250.0);
        }
    }

    #[test]
    fn powers_of_e_and_roundings_are_those_of_the_libraries() {
        for i in (-8700..8800).step_by(if cfg!(miri) { 100 } else { 1 }) {
            let x = i as f32 / 100.0;
            let wanted = f64::from(x).exp();
            for found in [exp::<true>(x), exp::<false>(x)] {
                assert!((f64::from(found) / wanted - 1.0).abs() < 4e-7, "{x} {found} {wanted}");
            }
        }
        assert!(exp::<true>(f32::NEG_INFINITY) < 1e-37);
        for bits in (0..=u32::MAX).step_by(if cfg!(miri) { 9_999_991 } else { 65_521 }) {
            let value = f32::from_bits(bits);
            let (found, wanted) = (rounded(value), bf16::from_f32(value));
            assert!(found == wanted || found.is_nan() && wanted.is_nan(), "{value}");
        }
    }

    #[test]
    fn rows_of_a_table_are_added_with_factors() {
        for set in InstructionSet::available() {
            let mut x = values(70, 7);
            let added: Vec<_> = values(70, 8).into_iter().map(bf16::from_f32).collect();
            let wanted: Vec<_> = x
                .iter()
                .zip(&added)
                .map(|(&x, a)| (f64::from(x) + a.to_f64() * 16.0) * 0.7)
                .collect();
            scale_add(set, &mut x, &added, 16.0, 0.7);
            assert_near(set, x.iter().map(|&v| f64::from(v)), &wanted, 1e-5);
        }
    }
}
