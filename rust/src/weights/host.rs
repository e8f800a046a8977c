//! Weights as plain values in memory or in their file, for fast mode's kernels.

use std::{ops::Range, sync::Arc};

use half::bf16;

use super::{Region, Weights, gguf::BlockTable, packed::PackedTable};
use crate::{
    aten::DType,
    error::{Error, Result},
    kernels::{Bf16Matrix, Huge, Kernels, Matrix, Values},
};

/// A table of which single rows are looked up.
pub(crate) enum Table {
    /// As it is used.
    Dense(Bf16Matrix),
    /// As it is stored; each row is unpacked when it is wanted.
    Packed(PackedTable),
    /// As it is stored in a GGUF file; likewise.
    Blocks(BlockTable),
}

impl Table {
    /// Writes some columns of row `index` to `out`.
    pub(crate) fn read(&self, index: usize, columns: Range<usize>, out: &mut [bf16]) {
        match self {
            Self::Dense(matrix) => out.copy_from_slice(&matrix.row(index)[columns]),
            Self::Packed(table) => table.read(index, columns, out),
            Self::Blocks(table) => table.read(index, columns, out),
        }
    }
}

impl Values for Region {
    fn values(&self) -> &[bf16] {
        // Whoever makes a matrix of it sees that there are enough.
        bytemuck::try_cast_slice(self.bytes()).unwrap_or_default()
    }
}

impl Values for Huge<bf16> {
    fn values(&self) -> &[bf16] {
        self
    }
}

impl Weights {
    /// Weights are to be unpacked and multiplied by `kernels`.
    pub(crate) fn with_kernels(self, kernels: Arc<Kernels>) -> Self {
        Self { kernels: kernels.into(), ..self }
    }

    /// The matrix `[out, in]` as it is stored where there is a kernel for that, in bfloat16 elsewhere.
    ///
    /// # Errors
    /// As [`Weights::take`].
    pub(crate) fn take_stored(&mut self, name: &str, shape: [usize; 2]) -> Result<Matrix> {
        let packed = match self.in_blocks(name, &shape)? {
            Some(stored) => self.repack_blocks(name, shape, &stored)?,
            None if self.is_packed(name) => self.repack(name, shape)?,
            None => None,
        };
        let matrix = match packed {
            Some(matrix) => {
                self.bits = self.bits.min(matrix.form().bits());
                matrix
            }
            None => Matrix::Bf16(self.dense(name, shape)?),
        };
        self.bytes += matrix.bytes() as u64;
        Ok(matrix)
    }

    /// The table `[rows, width]`, of which rows will be looked up.
    ///
    /// # Errors
    /// As [`Weights::take`].
    pub(crate) fn take_table(&mut self, name: &str, shape: [usize; 2]) -> Result<Table> {
        let (table, bytes) = if let Some(stored) = self.in_blocks(name, &shape)? {
            let table = self.block_table(name, shape[1], stored);
            let bytes = table.bytes();
            (Table::Blocks(table), bytes)
        } else if self.is_packed(name) {
            let table = self.packed_table(name, shape)?;
            let bytes = table.bytes();
            (Table::Packed(table), bytes)
        } else {
            (Table::Dense(self.dense(name, shape)?), 2 * shape[0] * shape[1])
        };
        self.bytes += bytes as u64;
        Ok(table)
    }

    /// The values of a small tensor, rounded to bfloat16 as everywhere.
    ///
    /// # Errors
    /// As [`Weights::take`].
    pub(crate) fn take_vector(&mut self, name: &str, len: usize) -> Result<Vec<f32>> {
        let tensor = self.take(name, &[len])?.contiguous()?;
        tensor.with_bf16(|values| values.iter().map(|value| value.to_f32()).collect())
    }

    fn dense(&mut self, name: &str, shape: [usize; 2]) -> Result<Bf16Matrix> {
        let values: Arc<dyn Values> = if self.is_packed(name) && !self.entries.contains_key(name) {
            let map = self.unpack_into_memory(name, shape)?;
            Arc::new(Region { map, range: 0..2 * shape[0] * shape[1] })
        } else {
            self.stored_values(name, &shape)?
        };
        Bf16Matrix::new(shape, values)
            .ok_or_else(|| Error::Internal(format!("{name} has not the values of its shape")))
    }

    /// The values where the file has them, if it has them in bfloat16 and at even addresses; or a copy.
    pub(super) fn stored_values(&mut self, name: &str, shape: &[usize]) -> Result<Arc<dyn Values>> {
        let count = shape.iter().product();
        if let Some((blocks, region)) = self.in_blocks(name, shape)? {
            let map = self.values_in_memory((&blocks, &region), shape, DType::Bf16)?;
            self.taken.insert(name.to_owned());
            return Ok(Arc::new(Region { map, range: 0..2 * count }));
        }
        let sizes: Vec<_> = shape.iter().map(|&size| size as i64).collect();
        match self.find(name, shape)? {
            Some((region, DType::Bf16)) if region.values().len() == count => Ok(Arc::new(region)),
            Some((region, dtype)) => {
                let tensor = region.map.tensor(region.range.clone(), &sizes, dtype)?;
                let mut copy = Huge::zeroed(count)?;
                tensor
                    .to_dtype(DType::Bf16)?
                    .contiguous()?
                    .with_bf16(|values| copy.copy_from_slice(values))?;
                Ok(Arc::new(copy))
            }
            None => Err(self.missing(name)),
        }
    }
}
