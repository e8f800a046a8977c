//! ATen tensors for Rust: handles with ATen's own method names, every call fallible.
//!
//! The one place of the crate that calls the C++ shim, and with it one of two places with `unsafe`
//! (CPU kernels are the other). It knows nothing of models.
#![expect(unsafe_code, reason = "the C ABI of shim/aten.h and memory maps are reached from here")]

mod ffi;
mod mapped_file;
mod ops;
#[cfg(feature = "python")]
mod python;

use std::{
    ffi::{CStr, c_char},
    ptr::NonNull,
};

pub(crate) use mapped_file::MappedFile;

use crate::error::{Error, Result};

/// Element types of the tensors the model uses; the numbers are those of `shim/aten.h`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(i32)]
pub(crate) enum DType {
    /// float32
    F32 = 0,
    /// bfloat16
    Bf16 = 1,
    /// float16
    F16 = 2,
    /// int64
    I64 = 3,
    /// bool
    Bool = 4,
    /// int8
    I8 = 5,
}

impl DType {
    /// torch's name, without the module.
    pub(crate) const fn name(self) -> &'static str {
        match self {
            Self::F32 => "float32",
            Self::Bf16 => "bfloat16",
            Self::F16 => "float16",
            Self::I64 => "int64",
            Self::Bool => "bool",
            Self::I8 => "int8",
        }
    }

    /// Bytes of one element.
    pub(crate) const fn bytes(self) -> usize {
        match self {
            Self::F32 => 4,
            Self::Bf16 | Self::F16 => 2,
            Self::I64 => 8,
            Self::Bool | Self::I8 => 1,
        }
    }
}

/// A reference to an ATen tensor. Cloning shares storage, as in Python.
pub(crate) struct Tensor(NonNull<ffi::TtTensor>);

// SAFETY: the handle is a boxed `at::Tensor`, whose reference count is atomic; a handle is used by one
// thread at a time because nothing here hands out `&Tensor` across threads (`Sync` is not implemented).
unsafe impl Send for Tensor {}

impl Drop for Tensor {
    fn drop(&mut self) {
        // SAFETY: the handle came from the shim and is freed once.
        unsafe { ffi::tt_free(self.0.as_ptr()) }
    }
}

/// The text the shim kept for this thread's last failure.
fn last_error() -> String {
    // SAFETY: the call has no preconditions.
    let text = unsafe { ffi::tt_last_error() };
    // SAFETY: the shim returns a zero-terminated string that lives until this thread's next failure.
    let text = unsafe { CStr::from_ptr(text) };
    text.to_string_lossy().into_owned()
}

fn check(op: &'static str, status: i32) -> Result<()> {
    if status == 0 { Ok(()) } else { Err(Error::Aten { op, message: last_error() }) }
}

/// Threads ATen uses inside one operation.
///
/// # Errors
/// `Aten` when ATen cannot tell.
pub(crate) fn num_threads() -> Result<i32> {
    let mut count = 0;
    // SAFETY: `count` is writable for the call.
    check("get_num_threads", unsafe { ffi::tt_num_threads(&raw mut count) })?;
    Ok(count)
}

/// While it lives, this thread's ATen calls record nothing for autograd.
pub(crate) struct InferenceMode(NonNull<ffi::TtInferenceMode>, std::marker::PhantomData<*const ()>);

impl InferenceMode {
    /// Enters inference mode on this thread.
    ///
    /// # Errors
    /// `Aten` when ATen refuses.
    pub(crate) fn enter() -> Result<Self> {
        let mut guard = std::ptr::null_mut();
        // SAFETY: `guard` is writable for the call.
        check("InferenceMode", unsafe { ffi::tt_inference_mode_enter(&raw mut guard) })?;
        match NonNull::new(guard) {
            Some(guard) => Ok(Self(guard, std::marker::PhantomData)),
            None => Err(Error::Internal("the shim gave no inference-mode guard".into())),
        }
    }
}

impl Drop for InferenceMode {
    fn drop(&mut self) {
        // SAFETY: the guard came from the shim, is left once, and by the thread that entered it: the
        // raw-pointer marker keeps this type from being sent.
        unsafe { ffi::tt_inference_mode_leave(self.0.as_ptr()) }
    }
}

impl Tensor {
    fn raw(&self) -> ffi::Raw {
        self.0.as_ptr()
    }

    /// Wraps the handle that `make` writes to its out-parameter.
    fn made(op: &'static str, make: impl FnOnce(ffi::Out) -> i32) -> Result<Self> {
        let mut out = std::ptr::null_mut();
        check(op, make(&raw mut out))?;
        NonNull::new(out).map(Self).ok_or_else(|| Error::Internal(format!("{op} gave no tensor")))
    }

    /// As [`Tensor::made`], of two handles.
    fn made_two(
        op: &'static str,
        make: impl FnOnce(ffi::Out, ffi::Out) -> i32,
    ) -> Result<(Self, Self)> {
        let mut second = std::ptr::null_mut();
        let first = Self::made(op, |first| make(first, &raw mut second))?;
        match NonNull::new(second) {
            Some(second) => Ok((first, Self(second))),
            None => Err(Error::Internal(format!("{op} gave one tensor instead of two"))),
        }
    }

    // -- what it is --

    /// The element type.
    pub(crate) fn dtype(&self) -> Result<DType> {
        let mut code = -1;
        // SAFETY: the handle is live and `code` is writable.
        check("dtype", unsafe { ffi::tt_dtype(self.raw(), &raw mut code) })?;
        [DType::F32, DType::Bf16, DType::F16, DType::I64, DType::Bool, DType::I8]
            .into_iter()
            .find(|dtype| *dtype as i32 == code)
            .ok_or_else(|| Error::Internal(format!("the shim knows no dtype {code}")))
    }

    /// The sizes of all dimensions.
    pub(crate) fn sizes(&self) -> Result<Vec<i64>> {
        let mut dim = 0;
        // SAFETY: the handle is live and `dim` is writable.
        check("dim", unsafe { ffi::tt_dim(self.raw(), &raw mut dim) })?;
        let mut sizes = vec![0; dim as usize];
        // SAFETY: the handle is live and `sizes` has room for `dim` numbers.
        check("sizes", unsafe { ffi::tt_sizes(self.raw(), sizes.as_mut_ptr()) })?;
        Ok(sizes)
    }

    /// The device in torch's words: `cpu`, `tpu:0`.
    pub(crate) fn device(&self) -> Result<String> {
        let mut text: [c_char; 64] = [0; 64];
        // SAFETY: the handle is live and `text` is writable up to its length.
        check("device", unsafe { ffi::tt_device(self.raw(), text.as_mut_ptr(), text.len()) })?;
        // SAFETY: on success the shim wrote a zero-terminated string into `text`.
        Ok(unsafe { CStr::from_ptr(text.as_ptr()) }.to_string_lossy().into_owned())
    }
}
