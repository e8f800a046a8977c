//! Memory for weights and caches in huge pages, where the system has them.
//!
//! A token reads a gigabyte once from end to end. In pages of 4 KiB that is a quarter of a million address
//! translations.
#![expect(unsafe_code, reason = "plain values are made of mapped memory")]

use std::{marker::PhantomData, ops::Range};

use memmap2::MmapMut;

use crate::error::{Error, Result};

/// Types of which every pattern of bits is a value, zero too.
///
/// # Safety
/// So it must be, and their alignment at most a page.
pub(crate) unsafe trait Plain: Copy + Send + Sync {}
// SAFETY: numbers are.
unsafe impl Plain for u32 {}
// SAFETY: numbers are.
unsafe impl Plain for f32 {}
// SAFETY: numbers are.
unsafe impl Plain for half::bf16 {}
// SAFETY: arrays of them are.
unsafe impl<T: Plain, const N: usize> Plain for [T; N] {}

/// A fixed number of values, zero at first. Memory that is never written costs nothing.
pub(crate) struct Huge<T> {
    map: MmapMut,
    len: usize,
    _of: PhantomData<T>,
}

impl<T: Plain> Huge<T> {
    /// # Errors
    /// `Input` when there is no such memory.
    pub(crate) fn zeroed(len: usize) -> Result<Self> {
        let bytes = len * size_of::<T>();
        let map = MmapMut::map_anon(bytes.max(1))
            .map_err(|error| Error::Input(format!("expected {bytes} bytes of memory: {error}")))?;
        // A kernel without huge pages refuses; then they are small.
        #[cfg(all(target_os = "linux", not(miri)))]
        drop(map.advise(memmap2::Advice::HugePage));
        Ok(Self { map, len, _of: PhantomData })
    }
}

impl<T> std::ops::Deref for Huge<T> {
    type Target = [T];

    fn deref(&self) -> &[T] {
        // SAFETY: the map begins at a page, has room for `len` values, and any bits are a value (`Plain`, by the only
        // constructor).
        unsafe { std::slice::from_raw_parts(self.map.as_ptr().cast(), self.len) }
    }
}

impl<T> std::ops::DerefMut for Huge<T> {
    fn deref_mut(&mut self) -> &mut [T] {
        // SAFETY: as above, and `self` is borrowed mutably.
        unsafe { std::slice::from_raw_parts_mut(self.map.as_mut_ptr().cast(), self.len) }
    }
}

/// Values of which the pieces of one job write different parts.
pub(super) struct Shared<'a, T> {
    data: *mut T,
    len: usize,
    _borrow: PhantomData<&'a mut [T]>,
}

// SAFETY: it only gives out parts of a slice that is borrowed mutably, by an unsafe method whose callers see to it that
// they are different ones.
unsafe impl<T: Send> Sync for Shared<'_, T> {}

impl<'a, T> Shared<'a, T> {
    pub(super) fn new(values: &'a mut [T]) -> Self {
        Self { data: values.as_mut_ptr(), len: values.len(), _borrow: PhantomData }
    }

    /// The part `range`; panics when there is none.
    ///
    /// # Safety
    /// No two parts that live at once overlap.
    #[expect(clippy::mut_from_ref, reason = "the caller keeps parts apart")]
    pub(super) unsafe fn part(&self, range: Range<usize>) -> &mut [T] {
        assert!(range.start <= range.end && range.end <= self.len);
        // SAFETY: the part is inside.
        let first = unsafe { self.data.add(range.start) };
        // SAFETY: as above; that it is nobody else's, the caller says.
        unsafe { std::slice::from_raw_parts_mut(first, range.len()) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_is_zero_at_first_and_holds_what_is_written() {
        let mut values = Huge::<f32>::zeroed(3000).unwrap();
        assert_eq!(values.len(), 3000);
        assert!(values.iter().all(|&value| value == 0.0));
        values[2999] = 1.5;
        assert_eq!(values[2998..], [0.0, 1.5]);
        assert!(Huge::<u32>::zeroed(0).unwrap().is_empty());
    }
}
