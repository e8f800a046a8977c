//! Tensors of GGUF files, as any others by Hugging Face's names; those in blocks are made values of when they are taken.
//!
//! What llama.cpp's converter changed is undone here: it stores Gemma 3's norms as 1 + w. Values have the bits that transformers
//! reads: in float32 first, then rounded to the model's element type.

use std::{
    collections::HashMap,
    ops::Range,
    sync::{Arc, Mutex},
};

use half::{bf16, f16};
use safetensors::Dtype;

use super::{Entry, Region, Shard, Weights, kept::form_of_type};
use crate::{
    aten::{DType, MappedFile, Tensor},
    error::Result,
    gguf::{Gguf, MOST, ROPE_FREQS, Type, dequantize, hugging_face_name, integers, k_block},
    kernels::{
        GROUP_SIZE, KBlock, Matrix, MatrixForm, Pool, Q4KMatrix, Q5KMatrix, Q6KMatrix, W4Matrix,
        W8Matrix,
    },
};

/// Values that a thread makes before it looks for more to do.
const AT_ONCE: usize = 1 << 18;

/// How a tensor's bytes become values.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Blocks {
    kind: Type,
    /// Stored as 1 + w.
    less_one: bool,
}

impl Blocks {
    /// ggml's name of the type.
    pub(super) const fn name(self) -> &'static str {
        self.kind.name()
    }

    /// Calls `put(index, value)` for the values of `bytes`, whole blocks.
    fn each(self, bytes: &[u8], mut put: impl FnMut(usize, f32)) {
        let (count, size) = self.kind.block();
        let mut values = [0.0; MOST];
        let values = &mut values[..count];
        for (block, bytes) in bytes.chunks_exact(size).enumerate() {
            dequantize(self.kind, bytes, values);
            for (index, &value) in values.iter().enumerate() {
                put(block * count + index, if self.less_one { value - 1.0 } else { value });
            }
        }
    }

    /// The values of `bytes` in the element type `to`, into `out`.
    fn fill(self, bytes: &[u8], to: DType, (out, pool): (&mut [u8], &Pool)) -> Result<()> {
        let (count, size) = self.kind.block();
        let blocks = AT_ONCE / count;
        let pieces: Vec<_> = out.chunks_mut(blocks * count * to.bytes()).map(Mutex::new).collect();
        pool.run(pieces.len(), &|piece| {
            let Ok(mut out) = pieces[piece].lock() else { return };
            let start = piece * blocks * size;
            let bytes = &bytes[start..(start + blocks * size).min(bytes.len())];
            match to {
                DType::Bf16 => {
                    let (out, _) = out.as_chunks_mut();
                    self.each(bytes, |i, value| out[i] = bf16::from_f32(value).to_ne_bytes());
                }
                DType::F16 => {
                    let (out, _) = out.as_chunks_mut();
                    self.each(bytes, |i, value| out[i] = f16::from_f32(value).to_ne_bytes());
                }
                _ => {
                    let (out, _) = out.as_chunks_mut();
                    self.each(bytes, |i, value| out[i] = value.to_ne_bytes());
                }
            }
        })
    }
}

/// A table in blocks, in its file.
pub(crate) struct BlockTable {
    blocks: Blocks,
    bytes: Region,
    columns: usize,
}

impl BlockTable {
    /// Bytes in its file.
    pub(super) fn bytes(&self) -> usize {
        self.bytes.bytes().len()
    }

    /// Makes values of some columns of row `index`, into `out`.
    pub(super) fn read(&self, index: usize, columns: Range<usize>, out: &mut [bf16]) {
        let (count, size) = self.blocks.kind.block();
        // Of the row, the blocks that have these columns.
        let blocks = columns.start / count..columns.end.div_ceil(count);
        let row = index * self.columns / count;
        let bytes = &self.bytes.bytes()[(row + blocks.start) * size..(row + blocks.end) * size];
        let first = blocks.start * count;
        self.blocks.each(bytes, |i, value| {
            if columns.contains(&(first + i)) {
                out[first + i - columns.start] = bf16::from_f32(value);
            }
        });
    }
}

impl Weights {
    /// The tensors of one GGUF model.
    pub(super) fn add_gguf(&mut self, gguf: &Gguf) -> Result<HashMap<String, Entry>> {
        let norms_less_one = gguf.architecture()? == "gemma3";
        let mut entries = HashMap::new();
        for file in &gguf.files {
            for tensor in &file.tensors {
                if tensor.name == ROPE_FREQS {
                    continue;
                }
                // transformers' rule (`Gemma2TensorProcessor`).
                let less_one = norms_less_one && tensor.name.contains("norm.weight");
                let in_blocks = tensor.kind.is_quantized() || less_one;
                let entry = Entry {
                    shard: self.shards.len(),
                    dtype: match tensor.kind {
                        Type::F32 => Dtype::F32,
                        Type::F16 => Dtype::F16,
                        Type::Bf16 => Dtype::BF16,
                        _ => Dtype::U8,
                    },
                    shape: tensor.shape.clone(),
                    range: tensor.range.clone(),
                    blocks: in_blocks.then_some(Blocks { kind: tensor.kind, less_one }),
                    name: tensor.name.clone(),
                };
                // A name without a place keeps its own, by which it will be refused.
                let name = hugging_face_name(&tensor.name).unwrap_or_else(|| tensor.name.clone());
                entries.insert(name, entry);
            }
            let (path, map) = (file.path.clone(), Arc::clone(&file.map));
            self.shards.push(Shard { path, map, data_start: 0 });
        }
        Ok(entries)
    }

    /// The tensor `name` of exactly `shape`, if it is in blocks, with its entry.
    pub(super) fn in_blocks(
        &self,
        name: &str,
        shape: &[usize],
    ) -> Result<Option<(Blocks, Region)>> {
        let Some(entry) = self.entries.get(name) else { return Ok(None) };
        let Some(blocks) = entry.blocks else { return Ok(None) };
        self.check_entry(entry, shape)?;
        Ok(Some((blocks, self.region_of(entry))))
    }

    /// Values made of blocks, on the host and in the model's element type.
    ///
    /// # Errors
    /// `Input` when there is no memory for them, `Internal` when a thread failed.
    pub(super) fn values_of(
        &mut self,
        name: &str,
        shape: &[usize],
        (blocks, region): &(Blocks, Region),
    ) -> Result<Tensor> {
        let to = self.like.dtype()?;
        let sizes: Vec<_> = shape.iter().map(|&size| size as i64).collect();
        self.taken.insert(name.to_owned());
        if self.form.shapes_only {
            return Tensor::zeros(&sizes, to, &self.like);
        }
        let memory = self.values_in_memory((blocks, region), shape, to)?;
        memory.tensor(0..memory.bytes().len(), &sizes, to)
    }

    pub(super) fn values_in_memory(
        &self,
        (blocks, region): (&Blocks, &Region),
        shape: &[usize],
        to: DType,
    ) -> Result<Arc<MappedFile>> {
        let kernels = self.kernels()?;
        let mut done = Ok(());
        let len = shape.iter().product::<usize>() * to.bytes();
        let memory = MappedFile::in_memory(len, |out| {
            done = blocks.fill(region.bytes(), to, (out, &kernels.pool));
        })?;
        done?;
        Ok(memory)
    }

    /// The table of blocks in its file.
    pub(super) fn block_table(
        &mut self,
        name: &str,
        columns: usize,
        (blocks, bytes): (Blocks, Region),
    ) -> BlockTable {
        self.taken.insert(name.to_owned());
        BlockTable { blocks, bytes, columns }
    }

    /// The weights of `shape` that stand one after the other in the tensor `name`, as they are multiplied; `None` if there is no
    /// kernel for its type.
    pub(super) fn repack_stack(
        &mut self,
        name: &str,
        shape: [usize; 2],
        (blocks, region): &(Blocks, Region),
    ) -> Result<Option<Vec<Matrix>>> {
        let (count, size) = blocks.kind.block();
        // Rows are whole blocks.
        let len = shape[0] * (shape[1] / count * size);
        let range = region.range.clone();
        range
            .clone()
            .step_by(len.max(1))
            .map(|start| {
                let range = start..range.end.min(start + len);
                let one = Region { map: Arc::clone(&region.map), range };
                self.repack_blocks(name, shape, &(*blocks, one))
            })
            .collect()
    }

    /// The weight as it is multiplied; `None` if there is no kernel for its type.
    pub(super) fn repack_blocks(
        &mut self,
        name: &str,
        shape: [usize; 2],
        (blocks, region): &(Blocks, Region),
    ) -> Result<Option<Matrix>> {
        let kernels = self.kernels()?;
        let bytes = region.bytes();
        let kind = blocks.kind;
        let size = kind.block().1;
        let bytes_of = |index: usize| &bytes[index * size..(index + 1) * size];
        let k = |index: usize| k_block(kind, bytes_of(index)).unwrap_or(KBlock::NONE);
        let matrix = match form_of_type(kind, shape[1]) {
            MatrixForm::W4 => W4Matrix::of_q4_0(shape, bytes, &kernels)?.map(Matrix::W4),
            MatrixForm::W8 => {
                let group = |index: usize| {
                    integers(kind, bytes_of(index)).unwrap_or((f16::NAN, [0; GROUP_SIZE]))
                };
                W8Matrix::of_halves(shape, &group, &kernels)?.map(Matrix::W8)
            }
            MatrixForm::Q4K => Q4KMatrix::of_blocks(shape, &k, &kernels)?.map(Matrix::Q4K),
            MatrixForm::Q5K => Q5KMatrix::of_blocks(shape, &k, &kernels)?.map(Matrix::Q5K),
            MatrixForm::Q6K => Q6KMatrix::of_blocks(shape, &k, &kernels)?.map(Matrix::Q6K),
            MatrixForm::Bf16 => None,
        };
        if matrix.is_some() {
            self.taken.insert(name.to_owned());
        }
        Ok(matrix)
    }
}
