//! The forms in which a model wants its weights: transformers' own, or what compiled programs multiply.

use crate::{
    aten::{DType, Tensor},
    error::Result,
};

/// In which operations the model's mathematics is written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Arithmetic {
    /// Those of transformers, call for call, on weights `[out, in]`.
    Exact,
    /// Those that XLA makes the fastest program of; weights are stored `[in, out]`.
    Compiled,
}

/// The form that tensors are wanted in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Form {
    pub(crate) arithmetic: Arithmetic,
    /// Projections as int8 with one factor an output row; only with [`Arithmetic::Compiled`].
    pub(crate) int8: bool,
    /// Zeros in place of values: for capturing a step and for cost estimates, under fake tensors. A
    /// folder with nothing but config.json will do.
    pub(crate) shapes_only: bool,
}

impl Form {
    /// The checkpoint's values, multiplied as transformers does.
    pub(crate) const EXACT: Self =
        Self { arithmetic: Arithmetic::Exact, int8: false, shapes_only: false };

    /// What compiled programs compute with.
    pub(crate) const fn compiled(int8: bool) -> Self {
        Self { arithmetic: Arithmetic::Compiled, int8, shapes_only: false }
    }
}

/// Most bytes of a part of a compiled projection's weight on a v5e. XLA brings a weight into the chip's 128 MiB
/// of vector memory while earlier instructions run, if there is room for all of it; 9 MiB is half of
/// E2B's widest projection in int8 (docs/log.md has other sizes).
pub(super) const PART_BYTES: usize = 9 << 20;

/// `weight` `[in, out]` in parts of its outputs, all equally wide but the last, of at most `part_bytes` each.
pub(super) fn split(weight: &Tensor, part_bytes: usize) -> Result<Vec<Tensor>> {
    let outputs = weight.sizes()?[1] as usize;
    let width = outputs.div_ceil((bytes(weight)? as usize).div_ceil(part_bytes).max(1)) as i64;
    (0..outputs as i64)
        .step_by(width.max(1) as usize)
        .map(|start| weight.narrow(1, start, width.min(outputs as i64 - start)))
        .collect()
}

pub(super) fn bytes(tensor: &Tensor) -> Result<u64> {
    Ok(tensor.sizes()?.iter().product::<i64>() as u64 * tensor.dtype()?.bytes() as u64)
}

/// int8 values and one factor for each row of `weight` `[rows, columns]`: the row's largest magnitude
/// becomes 127.
pub(super) fn quantize(weight: &Tensor) -> Result<(Tensor, Tensor)> {
    let weight = weight.to_dtype(DType::F32)?;
    // A row of zeros has no magnitude to divide by.
    let scale =
        weight.abs()?.amax_last()?.div_scalar(127.0)?.clamp_min(f64::from(f32::MIN_POSITIVE))?;
    let values = weight.div(&scale)?.round()?.to_dtype(DType::I8)?;
    Ok((values, scale))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::aten::MappedFile;

    #[test]
    fn the_parts_of_a_weight_are_small_enough_and_join_to_the_whole() {
        let file = tempfile::NamedTempFile::new().unwrap();
        let values: Vec<u8> = (0..40_i64).flat_map(i64::to_le_bytes).collect();
        std::fs::write(file.path(), values).unwrap();
        let map = MappedFile::open(file.path()).unwrap();
        let weight = map.tensor(0..320, &[4, 10], DType::I64).unwrap();
        for (part_bytes, widths) in [(1 << 20, vec![10]), (200, vec![5, 5]), (150, vec![4, 4, 2])] {
            let parts = split(&weight, part_bytes).unwrap();
            let found: Vec<_> = parts.iter().map(|part| part.sizes().unwrap()[1]).collect();
            assert_eq!(found, widths);
            let joined = Tensor::cat(&parts.iter().collect::<Vec<_>>(), 1).unwrap();
            assert_eq!(joined.read_i64().unwrap(), (0..40).collect::<Vec<_>>());
        }
    }
}
