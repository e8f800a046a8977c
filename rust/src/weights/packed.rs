//! Packed weights as their files have them: compressed-tensors' `pack-quantized` (gemma4.md 5.1, 5.2).
//!
//! A weight `X.weight` `[out, in]` is stored as `X.weight_packed`, words of 32 bits that hold the integers of a row,
//! lowest bits first, each plus half its range; `X.weight_scale`, a factor for each row and group of columns; and
//! `X.weight_shape`. Asymmetric ones have `X.weight_zero_point`, packed likewise along rows.

use std::{borrow::Cow, ops::Range, sync::Arc};

use half::{bf16, f16};
use safetensors::Dtype;

use super::{
    Entry, Region, Weights, brief, is_other,
    kept::form_of_scheme,
    model_dtype,
    words::{Layout, Numbers, float, round},
};
use crate::{
    aten::{DType, MappedFile, Tensor},
    error::{Error, Result},
    kernels::{GROUP_SIZE, Matrix, MatrixForm, W4Matrix, W8Matrix},
};

/// A packed weight as its file has it.
struct Packed<'a> {
    layout: Layout,
    numbers: Numbers<'a>,
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
            let schemes: Vec<_> = self.schemes.iter().take(4).map(ToString::to_string).collect();
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
