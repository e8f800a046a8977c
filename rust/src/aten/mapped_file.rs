//! A file mapped for reading, or memory filled once; and tensors over the bytes.

use std::{ffi::c_void, fs::File, ops::Range, path::Path, sync::Arc};

use memmap2::{Mmap, MmapMut};

use super::{DType, Tensor, ffi};
use crate::error::{Error, Result};

/// A whole file in memory, private and read-only. Tensors made from it keep it alive.
pub(crate) struct MappedFile {
    map: Mmap,
}

impl MappedFile {
    /// Maps `path`.
    ///
    /// # Errors
    /// `Io` when the file cannot be opened or mapped.
    pub(crate) fn open(path: &Path) -> Result<Arc<Self>> {
        let io = |source| Error::Io { path: path.to_owned(), source };
        let file = File::open(path).map_err(io)?;
        // SAFETY: the map is read-only and private. Its bytes change only if another process cuts or
        // rewrites the checkpoint under a running server, which the README forbids.
        let map = unsafe { Mmap::map(&file) }.map_err(io)?;
        Ok(Arc::new(Self { map }))
    }

    /// `len` bytes of memory that `fill` writes, in place of a file's.
    ///
    /// # Errors
    /// `Input` when there is no such memory.
    pub(crate) fn in_memory(len: usize, fill: impl FnOnce(&mut [u8])) -> Result<Arc<Self>> {
        let refused = |error| Error::Input(format!("expected {len} bytes of memory: {error}"));
        let mut map = MmapMut::map_anon(len).map_err(refused)?;
        fill(&mut map);
        Ok(Arc::new(Self { map: map.make_read_only().map_err(refused)? }))
    }

    /// The file's bytes.
    pub(crate) fn bytes(&self) -> &[u8] {
        &self.map
    }

    /// A CPU tensor over `range` of the file, without a copy.
    ///
    /// # Errors
    /// `Aten` when ATen refuses the shape; `Internal` when `range` does not hold exactly that shape.
    pub(crate) fn tensor(
        self: &Arc<Self>,
        range: Range<usize>,
        shape: &[i64],
        dtype: DType,
    ) -> Result<Tensor> {
        let wanted = shape.iter().try_fold(dtype.bytes(), |n, &size| {
            usize::try_from(size).ok().and_then(|size| n.checked_mul(size))
        });
        let Some(bytes) = self.map.get(range).filter(|bytes| wanted == Some(bytes.len())) else {
            return Err(Error::Internal("a tensor view that does not match its bytes".into()));
        };
        let owner = Arc::into_raw(Arc::clone(self)).cast_mut().cast::<c_void>();
        // SAFETY: `bytes` lie inside the map and hold exactly `shape` of `dtype`; `owner` is a counted
        // reference that keeps the map alive until ATen calls `release` once, after the last view is
        // gone. Nothing in the crate writes to a weight, so the read-only pages are never written.
        let made = Tensor::made("from_blob", |out| unsafe {
            ffi::tt_from_blob(
                bytes.as_ptr().cast(),
                shape.as_ptr(),
                shape.len() as i64,
                dtype as i32,
                release,
                owner,
                out,
            )
        });
        if made.is_err() {
            // ATen runs the deleter only of a tensor that exists.
            release(owner);
        }
        made
    }
}

/// Drops the reference that [`MappedFile::tensor`] gave to ATen.
extern "C" fn release(owner: *mut c_void) {
    // SAFETY: `owner` came from `Arc::into_raw` in `MappedFile::tensor` and is given back once.
    drop(unsafe { Arc::from_raw(owner.cast_const().cast::<MappedFile>()) });
}
