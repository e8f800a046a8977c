//! Integers packed into words → values: compressed-tensors' `pack-quantized` (gemma4.md 5.1, 5.2).
//!
//! A weight `X.weight` `[out, in]` is stored as `X.weight_packed`, words of 32 bits that hold the integers of a row,
//! lowest bits first, each plus half its range; `X.weight_scale`, a factor for each row and group of columns; and
//! `X.weight_shape`. Asymmetric ones have `X.weight_zero_point`, packed likewise along rows.

use std::{
    borrow::Cow,
    ops::Range,
    sync::{Arc, Mutex},
};

use half::{bf16, f16};
use safetensors::Dtype;

use super::{Entry, Region, Weights, brief, is_other, kept::form_of_scheme, model_dtype};
use crate::{
    aten::{DType, MappedFile, Tensor},
    config::Scheme,
    error::{Error, Result},
    kernels::{GROUP_SIZE, Matrix, MatrixForm, Pool, W4Matrix, W8Matrix},
};

/// Values that a thread unpacks before it looks for more to do.
const UNPACKED_AT_ONCE: usize = 1 << 18;

/// A packed weight as its file has it.
struct Packed<'a> {
    layout: Layout,
    numbers: Numbers<'a>,
}

/// The bytes of a packed weight: little-endian words, zero points likewise, and factors.
#[derive(Clone, Copy)]
pub(super) struct Numbers<'a> {
    words: &'a [u8],
    zero_points: Option<&'a [u8]>,
    scale: &'a [u8],
    scale_dtype: DType,
}

/// A packed table in its file.
pub(crate) struct PackedTable {
    layout: Layout,
    words: Region,
    zero_points: Option<Region>,
    scale: Region,
    scale_dtype: DType,
    product: DType,
}

impl PackedTable {
    /// Bytes in its file.
    pub(super) fn bytes(&self) -> usize {
        self.words.bytes().len() + self.scale.bytes().len()
    }

    /// Unpacks some columns of row `index` to `out`.
    pub(super) fn read(&self, index: usize, columns: Range<usize>, out: &mut [bf16]) {
        let numbers = Numbers {
            words: self.words.bytes(),
            zero_points: self.zero_points.as_ref().map(Region::bytes),
            scale: self.scale.bytes(),
            scale_dtype: self.scale_dtype,
        };
        let row = (index, self.product);
        let size = self.layout.group_size();
        let encode = |q: i32, factor| bf16::from_f32(round(q as f32 * factor, self.product));
        if columns.start.is_multiple_of(size) && columns.end.is_multiple_of(size) {
            self.layout.fill(numbers, row, columns.start / size, encode, out);
        } else {
            let mut whole = vec![bf16::ZERO; self.layout.columns];
            self.layout.fill(numbers, row, 0, encode, &mut whole);
            out.copy_from_slice(&whole[columns]);
        }
    }
}

impl Packed<'_> {
    /// The bits of a factor for every [`GROUP_SIZE`] columns, and whether they are float16; else they are bfloat16, to which float32 is
    /// rounded.
    fn factors(&self) -> (Cow<'_, [u16]>, bool) {
        let Numbers { scale, scale_dtype, .. } = self.numbers;
        let is_half = scale_dtype == DType::F16;
        let repeats = self.layout.group_size() / GROUP_SIZE;
        if repeats == 1
            && scale_dtype != DType::F32
            && let Ok(factors) = bytemuck::try_cast_slice(scale)
        {
            return (Cow::Borrowed(factors), is_half);
        }
        // Of another type, for more columns, or at an odd address.
        let factor = |index| {
            let factor = float(scale, index, scale_dtype);
            if is_half { f16::from_f32(factor).to_bits() } else { bf16::from_f32(factor).to_bits() }
        };
        let count: usize = self.layout.scale().iter().product();
        let factors = (0..count).flat_map(|index| std::iter::repeat_n(factor(index), repeats));
        (Cow::Owned(factors.collect()), is_half)
    }
}

/// The tables that are looked up in and not multiplied with.
const TABLES: [&str; 2] = ["model.embed_tokens.weight", "model.embed_tokens_per_layer.weight"];

impl Weights {
    /// Whether the weight `name` is stored packed.
    pub(super) fn is_packed(&self, name: &str) -> bool {
        self.entries.contains_key(&format!("{name}_packed"))
    }

    /// The values of the packed weight `name`, on the host and in the model's element type.
    ///
    /// # Errors
    /// `Unsupported` without a scheme in config.json; `MissingTensor`, `Tensor` naming what does not fit it.
    pub(super) fn unpack(&mut self, name: &str, shape: [usize; 2]) -> Result<Tensor> {
        let to = self.like.dtype()?;
        let sizes = [shape[0] as i64, shape[1] as i64];
        if self.form.shapes_only {
            self.packed(name, shape)?;
            self.mark_taken(name);
            return Tensor::zeros(&sizes, to, &self.like);
        }
        let memory = self.unpack_into_memory(name, shape)?;
        memory.tensor(0..shape[0] * shape[1] * to.bytes(), &sizes, to)
    }

    /// The bytes of [`Weights::unpack`]'s values.
    pub(super) fn unpack_into_memory(
        &mut self,
        name: &str,
        shape: [usize; 2],
    ) -> Result<Arc<MappedFile>> {
        let found = self.packed(name, shape)?;
        let to = self.like.dtype()?;
        let product = self.product_type(&found)?;
        let kernels = self.kernels()?;
        let mut done = Ok(());
        let memory = MappedFile::in_memory(shape[0] * shape[1] * to.bytes(), |out| {
            let out = (out, &kernels.pool);
            done = found.layout.dequantize(found.numbers, (product, to), out);
        })?;
        done?;
        self.mark_taken(name);
        Ok(memory)
    }

    /// The packed table `name`, to be unpacked row by row.
    ///
    /// # Errors
    /// As [`Weights::unpack`].
    pub(super) fn packed_table(&mut self, name: &str, shape: [usize; 2]) -> Result<PackedTable> {
        let found = self.packed(name, shape)?;
        let (layout, scale_dtype) = (found.layout, found.numbers.scale_dtype);
        let product = self.product_type(&found)?;
        let region = |ending: &str| {
            let name = format!("{name}_{ending}");
            let entry = self.entries.get(&name).ok_or_else(|| self.missing(&name))?;
            Ok(self.region_of(entry))
        };
        let table = PackedTable {
            layout,
            words: region("packed")?,
            zero_points: layout.zero_point().map(|_| region("zero_point")).transpose()?,
            scale: region("scale")?,
            scale_dtype,
            product,
        };
        self.mark_taken(name);
        Ok(table)
    }

    /// The packed weight `name` in the order in which it is multiplied; `None` if there is no kernel for its form.
    ///
    /// # Errors
    /// As [`Weights::unpack`].
    pub(super) fn repack(&mut self, name: &str, shape: [usize; 2]) -> Result<Option<Matrix>> {
        let found = self.packed(name, shape)?;
        let (layout, numbers) = (found.layout, found.numbers);
        let form = form_of_scheme(layout.scheme, shape[1]);
        if form == MatrixForm::Bf16 {
            return Ok(None);
        }
        let kernels = self.kernels()?;
        let (factors, is_half) = found.factors();
        // What is no number has no float32 by the kernels' way to it.
        if is_half && factors.iter().any(|&bits| !f16::from_bits(bits).is_finite()) {
            return Ok(None);
        }
        let matrix = if form == MatrixForm::W4 {
            let factors = (&*factors, is_half);
            Matrix::W4(W4Matrix::of_words(shape, numbers.words, factors, &kernels)?)
        } else {
            let (groups, _) = numbers.words.as_chunks();
            let group = |index: usize| (factors[index], groups[index]);
            Matrix::W8(W8Matrix::of_groups(shape, &group, is_half, &kernels)?)
        };
        self.mark_taken(name);
        Ok(Some(matrix))
    }

    fn mark_taken(&mut self, name: &str) {
        for ending in ["packed", "scale", "shape", "zero_point"] {
            self.taken.insert(format!("{name}_{ending}"));
        }
    }

    /// The parts of the packed weight `name`, checked against config.json.
    fn packed(&self, name: &str, shape: [usize; 2]) -> Result<Packed<'_>> {
        let part = |ending: &str| self.entries.get(&format!("{name}_{ending}"));
        let needed =
            |ending: &str| part(ending).ok_or_else(|| self.missing(&format!("{name}_{ending}")));
        let (packed, scale) = (needed("packed")?, needed("scale")?);
        let zero_point = part("zero_point");
        if self.schemes.is_empty() {
            return Err(Error::Unsupported {
                file: self.shards[packed.shard].path.clone(),
                what: format!(
                    "a quantized weight (`{}`) without `quantization_config` in config.json",
                    packed.name
                ),
            });
        }
        let fits = |layout: &Layout| {
            packed.shape == layout.packed()
                && scale.shape == layout.scale()
                && zero_point.map(|entry| &*entry.shape)
                    == layout.zero_point().as_ref().map(|s| &s[..])
        };
        let mut layouts = self.schemes.iter().filter_map(|&scheme| Layout::new(shape, scheme));
        let Some(layout) = layouts.find(fits) else {
            let schemes: Vec<_> = self.schemes.iter().take(4).map(Scheme::to_string).collect();
            let reason = format!(
                "expected {shape:?} packed as config.json says ({}), found words {}, factors {} and {}",
                schemes.join("; "),
                brief(&packed.shape),
                brief(&scale.shape),
                zero_point.map_or("no zero points".to_owned(), |entry| {
                    format!("zero points {}", brief(&entry.shape))
                }),
            );
            return Err(self.wrong(packed, reason));
        };
        for entry in [Some(packed), zero_point].into_iter().flatten() {
            if entry.dtype != Dtype::I32 {
                return Err(self.wrong(entry, format!("expected I32, found {:?}", entry.dtype)));
            }
        }
        let Some(scale_dtype) = model_dtype(scale.dtype) else {
            let reason = format!("expected BF16, F16 or F32, found {:?}", scale.dtype);
            return Err(self.wrong(scale, reason));
        };
        let stored = needed("shape")?;
        self.check_shape(stored, shape)?;
        let numbers = Numbers {
            words: self.bytes_of(packed),
            zero_points: zero_point.map(|entry| self.bytes_of(entry)),
            scale: self.bytes_of(scale),
            scale_dtype,
        };
        Ok(Packed { layout, numbers })
    }

    /// The type in which integer and factor are multiplied.
    fn product_type(&self, found: &Packed<'_>) -> Result<DType> {
        if self.is_unpacked_beforehand() {
            Ok(found.numbers.scale_dtype)
        } else {
            self.like.dtype()
        }
    }

    /// Transformers 5.24 multiplies integer and factor in the model's type where it runs a checkpoint as stored. It cannot where
    /// a table is packed or integers have zero points: then it unpacks all weights beforehand
    /// (`dequantize=True`), in the factors' own type.
    fn is_unpacked_beforehand(&self) -> bool {
        TABLES.iter().any(|table| self.is_packed(table))
            || self.entries.keys().any(|name| name.ends_with("_zero_point") && !is_other(name))
    }

    /// `weight_shape` says the shape without padding.
    fn check_shape(&self, entry: &Entry, shape: [usize; 2]) -> Result<()> {
        let bytes = match (entry.dtype, &entry.shape[..]) {
            (Dtype::I64, [2]) => 8,
            (Dtype::I32, [2]) => 4,
            (dtype, found) => {
                let reason = format!("expected I64 [2], found {dtype:?} {}", brief(found));
                return Err(self.wrong(entry, reason));
            }
        };
        let numbers: Vec<_> = self.bytes_of(entry).chunks_exact(bytes).map(little).collect();
        if numbers != shape.map(|size| size as i64) {
            let reason = format!("expected {shape:?} by config.json, found {numbers:?}");
            return Err(self.wrong(entry, reason));
        }
        Ok(())
    }

    fn bytes_of(&self, entry: &Entry) -> &[u8] {
        &self.shards[entry.shard].map.bytes()[self.range_of(entry)]
    }
}

/// A signed number from its bytes, the lowest first.
fn little(bytes: &[u8]) -> i64 {
    let mut all = [if bytes.last().is_some_and(|&high| high > 127) { 255 } else { 0 }; 8];
    all[..bytes.len()].copy_from_slice(bytes);
    i64::from_le_bytes(all)
}

/// A packed weight's shapes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Layout {
    rows: usize,
    columns: usize,
    scheme: Scheme,
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

    fn group_size(&self) -> usize {
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
    fn fill<T: Copy>(
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

fn float(bytes: &[u8], index: usize, dtype: DType) -> f32 {
    let half = || [bytes[2 * index], bytes[2 * index + 1]];
    match dtype {
        DType::Bf16 => bf16::from_le_bytes(half()).to_f32(),
        DType::F16 => f16::from_le_bytes(half()).to_f32(),
        _ => f32::from_bits(word(bytes, index)),
    }
}

fn round(value: f32, dtype: DType) -> f32 {
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
