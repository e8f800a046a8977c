//! Tokens in fixed point: what instructions that multiply integers take in.
//!
//! Thirty-two columns share a power of two, and a value is an integer of 15 bits times it, in two bytes. A bfloat16
//! has eight significant bits, so all values down to a 64th of the group's largest are exact, and smaller ones are wrong
//! by at most 2^-14 of the largest: a 32nd of what rounding the largest to bfloat16 cost.

use half::bf16;

use super::for_each_set;

/// Columns of a group.
pub(super) const GROUP: usize = 32;

/// Bits of an integer, without its sign. With 15 the largest bfloat16 below a power of two would need a `high` of 128.
const BITS: i32 = 14;

/// The least power of two: that of 2^-100, so that its inverse is a number. Smaller values are zero.
const LEAST: i32 = -100;

/// What is added to a float32 to have an integer in its low bits.
const MAGIC: f32 = 12_582_912.0; // 1.5 · 2^23

/// What the two words of four columns are, each of which a product takes in in all lanes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Form {
    /// With signs, the high bytes and the low bytes: an integer is 256 times the one plus the other.
    Bytes,
    /// Integers of 16 bits: of columns 0 and 2, and of columns 1 and 3.
    Pairs,
}

/// Columns of a token.
#[repr(C, align(16))]
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(super) struct Fixed {
    /// First and second words of each four columns, as the [`Form`] has it; the first column's is lowest.
    pub(super) words: [[u32; GROUP / 4]; 2],
    /// Sums of the first and the second sixteen integers.
    pub(super) halves: [i32; 2],
    /// Sum of all.
    pub(super) sum: i32,
    /// The power of two; not a number where a value is infinite or none.
    pub(super) factor: f32,
}

for_each_set! {
    /// `x` in groups of 32 columns, as many as `out` has.
    pub(super) fn fix(x: &[bf16], form: Form, out: &mut [Fixed]) = fix_inner
}

#[expect(clippy::inline_always, reason = "compiled anew for the instructions of each caller")]
#[inline(always)]
fn fix_inner<const FUSED: bool>(x: &[bf16], form: Form, out: &mut [Fixed]) {
    let (groups, _) = x.as_chunks::<GROUP>();
    for (x, out) in groups.iter().zip(out) {
        // Sizes of floating-point numbers are in the order of their bits.
        let largest = x.iter().fold(0, |largest, x| largest.max(x.to_bits() & 0x7fff));
        let exponent = (i32::from(largest >> 7) - 127).max(LEAST);
        let scale = power_of_two(BITS - 1 - exponent);
        let integers = x.map(|x| {
            let x = f32::from_bits(u32::from(x.to_bits()) << 16);
            ((x * scale + MAGIC).to_bits().wrapping_sub(MAGIC.to_bits())).cast_signed()
        });
        let is_finite = largest < 0x7f80;
        let mut halves = [0_i32; 2];
        for (half, integers) in halves.iter_mut().zip(integers.as_chunks::<{ GROUP / 2 }>().0) {
            *half = integers.iter().fold(0, |sum, &q| sum.wrapping_add(q));
        }
        match form {
            Form::Bytes => {
                let high = integers.map(|q| (q.wrapping_add(128) >> 8) as u8);
                let low = integers.map(|q| q as u8);
                for (words, bytes) in out.words.iter_mut().zip([high, low]) {
                    for (word, four) in words.iter_mut().zip(bytes.as_chunks::<4>().0) {
                        *word = u32::from_le_bytes(*four);
                    }
                }
            }
            Form::Pairs => {
                let pair = |low: i32, high: i32| (low & 0xffff | high << 16).cast_unsigned();
                let [first, second] = &mut out.words;
                let words = first.iter_mut().zip(second);
                for ((first, second), four) in words.zip(integers.as_chunks::<4>().0) {
                    *first = pair(four[0], four[2]);
                    *second = pair(four[1], four[3]);
                }
            }
        }
        out.halves = halves;
        out.sum = halves[0].wrapping_add(halves[1]);
        out.factor = if is_finite { power_of_two(exponent + 1 - BITS) } else { f32::NAN };
    }
}

/// 2^`exponent`, which must be a normal number's.
#[expect(clippy::inline_always, reason = "compiled anew for the instructions of each caller")]
#[inline(always)]
const fn power_of_two(exponent: i32) -> f32 {
    f32::from_bits(((exponent + 127) as u32) << 23)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::kernels::InstructionSet;

    fn integer(fixed: &Fixed, form: Form, column: usize) -> i16 {
        let words = fixed.words.map(|words| words[column / 4]);
        match form {
            Form::Bytes => {
                let [high, low] = words.map(|word| word.to_le_bytes()[column % 4].cast_signed());
                256 * i16::from(high) + i16::from(low)
            }
            Form::Pairs => (words[column % 2] >> (column % 4 / 2 * 16)) as i16,
        }
    }

    fn value(fixed: &Fixed, column: usize) -> f64 {
        f64::from(integer(fixed, Form::Bytes, column)) * f64::from(fixed.factor)
    }

    /// In bytes, after a look at whether it is the same in every form with every instruction set.
    fn fixed(x: &[bf16; GROUP]) -> Fixed {
        let of = |set, form| {
            let mut out = [Fixed::default()];
            fix(set, x, form, &mut out);
            out[0]
        };
        let wanted = of(InstructionSet::Portable, Form::Bytes);
        for set in InstructionSet::available() {
            for form in [Form::Bytes, Form::Pairs] {
                let found = of(set, form);
                let sums = |fixed: &Fixed| (fixed.halves, fixed.sum, fixed.factor.to_bits());
                assert_eq!(sums(&found), sums(&wanted), "{set:?}");
                // Where a value is no number, integers mean nothing.
                for column in 0..if wanted.factor.is_nan() { 0 } else { GROUP } {
                    let integers =
                        (integer(&found, form, column), integer(&wanted, Form::Bytes, column));
                    assert_eq!(integers.0, integers.1, "{set:?} {form:?}");
                }
            }
        }
        wanted
    }

    proptest! {
        #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::with_cases(if cfg!(miri) { 3 } else { 3000 }) })]
        #[test]
        fn large_values_of_a_group_are_exact_and_small_ones_wrong_by_little(
            bits in prop::array::uniform32(any::<u16>()), exponents in 1_u16..250, around in 1_u16..40,
        ) {
            let x = bits.map(|bits| {
                let exponent = (exponents + (bits >> 7) % around).min(254);
                bf16::from_bits(bits & 0x807f | exponent << 7)
            });
            let fixed = fixed(&x);
            let largest = x.iter().map(|x| x.to_f64().abs()).fold(0.0, f64::max);
            for (column, x) in x.iter().enumerate() {
                let (x, found) = (x.to_f64(), value(&fixed, column));
                if x.abs() * 64.0 >= largest && largest > 1e-29 {
                    prop_assert_eq!(found, x);
                } else {
                    prop_assert!((found - x).abs() <= largest.max(1e-30) / 16384.0, "{} {} {}", found, x, largest);
                }
            }
            let sums = [0..16, 16..32].map(|half| half.map(|column| value(&fixed, column) / f64::from(fixed.factor)).sum::<f64>());
            prop_assert_eq!(sums, fixed.halves.map(f64::from));
            prop_assert_eq!(fixed.halves[0] + fixed.halves[1], fixed.sum);
        }
    }

    #[test]
    fn zeros_are_zero_and_what_is_no_number_stays_none() {
        let mut x = [bf16::ZERO; GROUP];
        assert!((0..GROUP).all(|column| value(&fixed(&x), column) == 0.0));
        x[3] = bf16::from_f32(-1.5);
        assert_eq!(value(&fixed(&x), 3), -1.5);
        for none in [bf16::NAN, bf16::INFINITY, bf16::NEG_INFINITY] {
            x[7] = none;
            assert!(fixed(&x).factor.is_nan());
        }
        // The widest mantissa, at both ends.
        for x in [bf16::MAX, bf16::MIN, bf16::from_bits(0x3fff), bf16::from_bits(0xbfff)] {
            assert_eq!(value(&fixed(&[x; GROUP]), 31), x.to_f64());
        }
    }
}
