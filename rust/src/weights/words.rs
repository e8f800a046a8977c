//! Integers in words of 32 bits, with factors → values (gemma4.md 5.1, 5.2).
//!
//! Knows a packed weight's layout and its bytes, not where these come from.

use std::sync::Mutex;

use half::{bf16, f16};

use crate::{aten::DType, config::Scheme, error::Result, kernels::Pool};

/// Values that a thread unpacks before it looks for more to do.
const UNPACKED_AT_ONCE: usize = 1 << 18;

/// The bytes of a packed weight: little-endian words, zero points likewise, and factors.
#[derive(Clone, Copy)]
pub(super) struct Numbers<'a> {
    pub(super) words: &'a [u8],
    pub(super) zero_points: Option<&'a [u8]>,
    pub(super) scale: &'a [u8],
    pub(super) scale_dtype: DType,
}

/// A packed weight's shapes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Layout {
    pub(super) rows: usize,
    pub(super) columns: usize,
    pub(super) scheme: Scheme,
}

impl Layout {
    /// `None` when the group size does not divide the columns, or a group does not begin at a whole byte.
    pub(super) fn new(shape: [usize; 2], scheme: Scheme) -> Option<Self> {
        let [rows, columns] = shape;
        let divides = scheme.group_size.is_none_or(|size| {
            columns.is_multiple_of(size) && (size * scheme.num_bits).is_multiple_of(8)
        });
        divides.then_some(Self { rows, columns, scheme })
    }

    fn per_word(&self) -> usize {
        32 / self.scheme.num_bits
    }

    pub(super) fn group_size(&self) -> usize {
        self.scheme.group_size.unwrap_or(self.columns)
    }

    /// Shape of `weight_packed`.
    pub(super) fn packed(&self) -> [usize; 2] {
        [self.rows, self.columns.div_ceil(self.per_word())]
    }

    /// Shape of `weight_scale`.
    pub(super) fn scale(&self) -> [usize; 2] {
        [self.rows, self.columns / self.group_size()]
    }

    /// Shape of `weight_zero_point`; `None` where there is none.
    pub(super) fn zero_point(&self) -> Option<[usize; 2]> {
        let [rows, groups] = self.scale();
        (!self.scheme.symmetric).then(|| [rows.div_ceil(self.per_word()), groups])
    }

    /// The integer at `index` of those packed in `words`.
    fn integer(&self, word: u32, index: usize) -> i32 {
        let bits = self.scheme.num_bits;
        let value = (word >> (bits * (index % self.per_word()))) & ((1 << bits) - 1);
        value as i32 - (1 << (bits - 1))
    }

    /// Every value, rounded to `product` and then to `to`, as bytes of `to`, into `out`: `[rows, columns]`.
    ///
    /// An integer times a factor is exact in float32 unless the factor itself is float32.
    pub(super) fn dequantize(
        &self,
        numbers: Numbers<'_>,
        (product, to): (DType, DType),
        (out, pool): (&mut [u8], &Pool),
    ) -> Result<()> {
        let out_row = self.columns * to.bytes();
        let value = |q: i32, factor| round(q as f32 * factor, product);
        let rows = (UNPACKED_AT_ONCE / self.columns).max(1);
        let pieces: Vec<_> = out.chunks_mut(rows * out_row).map(Mutex::new).collect();
        pool.run(pieces.len(), &|piece| {
            let Ok(mut out) = pieces[piece].lock() else { return };
            for (row, out) in (piece * rows..).zip(out.chunks_exact_mut(out_row)) {
                match to {
                    DType::Bf16 => {
                        let encode = |q, f| bf16::from_f32(value(q, f)).to_ne_bytes();
                        self.fill(numbers, (row, product), 0, encode, out.as_chunks_mut().0);
                    }
                    DType::F16 => {
                        let encode = |q, f| f16::from_f32(value(q, f)).to_ne_bytes();
                        self.fill(numbers, (row, product), 0, encode, out.as_chunks_mut().0);
                    }
                    _ => {
                        let encode = |q, f| value(q, f).to_ne_bytes();
                        self.fill(numbers, (row, product), 0, encode, out.as_chunks_mut().0);
                    }
                }
            }
        })
    }

    /// Writes `encode(integer, factor)` for the values of a row from group `first` on. A factor is rounded to the type that it multiplies in.
    pub(super) fn fill<T: Copy>(
        &self,
        numbers: Numbers<'_>,
        (row, product): (usize, DType),
        first: usize,
        encode: impl Fn(i32, f32) -> T,
        out: &mut [T],
    ) {
        let (size, row_bytes, [_, groups]) =
            (self.group_size(), 4 * self.packed()[1], self.scale());
        let words = &numbers.words[row * row_bytes..(row + 1) * row_bytes];
        for (group, out) in (first..).zip(out.chunks_exact_mut(size)) {
            let factor = float(numbers.scale, row * groups + group, numbers.scale_dtype);
            let factor = round(factor, product);
            let zero = numbers.zero_points.map_or(0, |zeros| {
                self.integer(word(zeros, row / self.per_word() * groups + group), row)
            });
            if self.scheme.num_bits == 4 {
                // Sixteen values occur in a group.
                let table: [_; 16] =
                    std::array::from_fn(|code| encode(code as i32 - 8 - zero, factor));
                // Groups begin at whole bytes: `new` asks for an even size.
                let bytes = &words[group * size / 2..];
                for (&byte, pair) in bytes.iter().zip(out.chunks_mut(2)) {
                    pair[0] = table[usize::from(byte & 15)];
                    if let Some(second) = pair.get_mut(1) {
                        *second = table[usize::from(byte >> 4)];
                    }
                }
            } else {
                for (&byte, out) in words[group * size..].iter().zip(out) {
                    *out = encode(i32::from(byte) - 128 - zero, factor);
                }
            }
        }
    }
}

fn word(bytes: &[u8], index: usize) -> u32 {
    let bytes = &bytes[4 * index..4 * index + 4];
    u32::from_le_bytes([bytes[0], bytes[1], bytes[2], bytes[3]])
}

pub(super) fn float(bytes: &[u8], index: usize, dtype: DType) -> f32 {
    let half = || [bytes[2 * index], bytes[2 * index + 1]];
    match dtype {
        DType::Bf16 => bf16::from_le_bytes(half()).to_f32(),
        DType::F16 => f16::from_le_bytes(half()).to_f32(),
        _ => f32::from_bits(word(bytes, index)),
    }
}

pub(super) fn round(value: f32, dtype: DType) -> f32 {
    match dtype {
        DType::Bf16 => bf16::from_f32(value).to_f32(),
        DType::F16 => f16::from_f32(value).to_f32(),
        _ => value,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn values(scheme: Scheme, shape: [usize; 2], words: &[u32], zeros: Option<&[u32]>) -> Vec<f32> {
        let layout = Layout::new(shape, scheme).unwrap();
        let bytes = |words: &[u32]| words.iter().flat_map(|w| w.to_le_bytes()).collect::<Vec<_>>();
        let scale: Vec<u8> = std::iter::repeat_n(0.5_f32, layout.scale().iter().product())
            .flat_map(f32::to_le_bytes)
            .collect();
        let mut out = vec![0; 4 * shape[0] * shape[1]];
        let (words, zeros) = (bytes(words), zeros.map(bytes));
        let numbers = Numbers {
            words: &words,
            zero_points: zeros.as_deref(),
            scale: &scale,
            scale_dtype: DType::F32,
        };
        let dtypes = (DType::F32, DType::F32);
        layout.dequantize(numbers, dtypes, (&mut out, &Pool::new(2))).unwrap();
        out.chunks_exact(4).map(|b| f32::from_ne_bytes([b[0], b[1], b[2], b[3]])).collect()
    }

    #[test]
    fn four_bits_stand_lowest_first_around_eight() {
        let scheme = Scheme { num_bits: 4, group_size: Some(8), symmetric: true };
        let found = values(scheme, [1, 16], &[0x7654_3210, 0xfedc_ba98], None);
        let wanted: Vec<_> = (-8..8).map(|q| q as f32 * 0.5).collect();
        assert_eq!(found, wanted);
    }

    #[test]
    fn eight_bits_stand_lowest_first_around_128_and_the_last_word_is_padded() {
        let scheme = Scheme { num_bits: 8, group_size: None, symmetric: true };
        let found = values(scheme, [2, 3], &[0x00_80_7f_00, 0x00_00_80_ff], None);
        assert_eq!(found, [-64.0, -0.5, 0.0, 63.5, 0.0, -64.0]);
    }

    #[test]
    fn zero_points_are_packed_along_the_rows() {
        let scheme = Scheme { num_bits: 4, group_size: Some(8), symmetric: false };
        // Nine rows of eights (integer 0); zero points -8 to 7 of the first eight rows, 3 of the ninth.
        let found = values(scheme, [9, 8], &[0x8888_8888; 9], Some(&[0x7654_3210, 0x0000_000b]));
        let rows: Vec<_> = found.chunks(8).map(|row| row[0]).collect();
        assert_eq!(rows, [4.0, 3.5, 3.0, 2.5, 2.0, 1.5, 1.0, 0.5, -1.5]);
    }

    #[test]
    fn groups_that_do_not_divide_the_columns_are_no_layout() {
        let scheme = Scheme { num_bits: 4, group_size: Some(32), symmetric: true };
        assert_eq!(Layout::new([4, 48], scheme), None);
    }
}
