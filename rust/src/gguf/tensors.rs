//! A GGUF file's list of tensors: names, shapes, types, and where each lies.

use std::{collections::BTreeSet, ops::Range, path::Path};

use super::{
    cursor::{Checked, Cursor},
    shortened,
    types::Type,
};
use crate::error::{Error, Result};

/// More than any name has; ggml itself stops at 64.
const MAX_NAME_BYTES: u64 = 256;
/// ggml's limit.
const MAX_DIMENSIONS: u32 = 4;
/// Hundreds of layers with hundreds of tensors each.
const MAX_TENSORS: u64 = 1 << 16;
/// A name's length, the count of dimensions, the type and the offset.
const LEAST_BYTES: u64 = 8 + 4 + 4 + 8;

/// One tensor.
#[derive(Clone, Debug)]
pub(crate) struct TensorInfo {
    pub(crate) name: String,
    /// Rows first, as PyTorch has it; the file has it the other way round.
    pub(crate) shape: Vec<usize>,
    pub(crate) kind: Type,
    /// Its bytes in the file.
    pub(crate) range: Range<usize>,
}

/// Reads `count` tensors; `cursor` goes over the whole file, whose tensors begin at the next multiple of `alignment` after them.
pub(super) fn read(
    path: &Path,
    count: u64,
    alignment: usize,
    cursor: &mut Cursor<'_>,
) -> Result<Vec<TensorInfo>> {
    let wrong = |reason| Error::Format { file: path.to_owned(), reason };
    let most = MAX_TENSORS.min(cursor.left() / LEAST_BYTES);
    if count > most {
        return Err(wrong(format!("expected at most {most} tensors here, found {count}")));
    }
    let mut tensors = Vec::with_capacity(count as usize);
    let mut names = BTreeSet::new();
    for index in 0..count {
        let name = cursor
            .text(MAX_NAME_BYTES)
            .map_err(|reason| wrong(format!("tensor {index}: {reason}")))?;
        let blame = |reason| Error::Tensor { file: path.to_owned(), name: shortened(name), reason };
        if !names.insert(name) {
            return Err(blame("expected the name once, found it twice".into()));
        }
        let shape = shape(cursor).map_err(blame)?;
        let number = cursor.u32().map_err(blame)?;
        let kind = Type::numbered(number).map_err(|other| match other {
            Some(other) => Error::Unsupported {
                file: path.to_owned(),
                what: format!(
                    "type {other} of tensor `{}` (expected {})",
                    shortened(name),
                    Type::names()
                ),
            },
            None => {
                blame(format!("expected a ggml type ({}), found number {number}", Type::names()))
            }
        })?;
        let offset = cursor.u64().map_err(blame)?;
        if !offset.is_multiple_of(alignment as u64) {
            return Err(blame(format!(
                "expected an offset divisible by {alignment}, found {offset}"
            )));
        }
        let bytes = kind.bytes(&shape).map_err(blame)?;
        // Relative to the first, until it is known where that is.
        let range = usize::try_from(offset).ok().zip(bytes.checked_add(offset as usize));
        let Some((start, end)) = range else {
            return Err(blame(format!("expected an offset inside the file, found {offset}")));
        };
        tensors.push(TensorInfo { name: name.to_owned(), shape, kind, range: start..end });
    }
    let total = cursor.at() + cursor.left() as usize;
    // A file without tensors may end before they would begin.
    let first = cursor.at().next_multiple_of(alignment).min(total);
    place(path, &mut tensors, first, total)?;
    Ok(tensors)
}

fn shape(cursor: &mut Cursor<'_>) -> Checked<Vec<usize>> {
    let dimensions = cursor.u32()?;
    if !(1..=MAX_DIMENSIONS).contains(&dimensions) {
        return Err(format!("expected 1 to {MAX_DIMENSIONS} dimensions, found {dimensions}"));
    }
    let mut shape = Vec::with_capacity(dimensions as usize);
    for _ in 0..dimensions {
        let size = cursor.u64()?;
        match usize::try_from(size) {
            Ok(size) if size > 0 => shape.push(size),
            _ => return Err(format!("expected sizes from 1 on, found {size}")),
        }
    }
    shape.reverse();
    Ok(shape)
}

/// Makes ranges absolute: tensors begin at `first` of `total` bytes, and none may share bytes with another.
fn place(path: &Path, tensors: &mut [TensorInfo], first: usize, total: usize) -> Result<()> {
    let blame = |tensor: &TensorInfo, reason| Error::Tensor {
        file: path.to_owned(),
        name: tensor.name.clone(),
        reason,
    };
    for tensor in &mut *tensors {
        let Range { start, end } = tensor.range;
        if end > total - first {
            let reason = format!(
                "expected bytes {start} to {end} of the {} that the file has for tensors (is the file cut short?)",
                total - first
            );
            return Err(blame(tensor, reason));
        }
        tensor.range = first + start..first + end;
    }
    let mut sorted: Vec<_> = tensors.iter().collect();
    sorted.sort_by_key(|tensor| tensor.range.start);
    for pair in sorted.windows(2) {
        if pair[0].range.end > pair[1].range.start {
            return Err(blame(pair[1], format!("it overlaps with tensor `{}`", pair[0].name)));
        }
    }
    Ok(())
}
