//! ATen tensors for Rust: handles with ATen's own method names, every call fallible.
//!
//! The one place of the crate that calls the C++ shim, and with it one of two places with `unsafe`
//! (CPU kernels are the other). It knows nothing of models.
#![expect(unsafe_code, reason = "the C ABI of shim/aten.h and memory maps are reached from here")]

mod ffi;
mod mapped_file;
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
        }
    }

    /// Bytes of one element.
    pub(crate) const fn bytes(self) -> usize {
        match self {
            Self::F32 => 4,
            Self::Bf16 | Self::F16 => 2,
            Self::I64 => 8,
            Self::Bool => 1,
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

/// Methods that make a tensor from `self` and, where named, one other tensor.
macro_rules! ops {
    ($($(#[$doc:meta])* $name:ident => $shim:ident ( $($argument:ident),* );)*) => {
        impl Tensor {
            $(
                $(#[$doc])*
                pub(crate) fn $name(&self $(, $argument: &Self)*) -> Result<Self> {
                    // SAFETY: every handle is live for the call and `out` is writable.
                    Self::made(stringify!($name), |out| unsafe {
                        ffi::$shim(self.raw(), $($argument.raw(),)* out)
                    })
                }
            )*
        }
    };
}

ops! {
    /// The same tensor under a second handle.
    alias => tt_alias();
    to_cpu => tt_to_cpu();
    /// This tensor with `other`'s element type, on `other`'s device.
    type_as => tt_type_as(other);
    add => tt_add(other);
    sub => tt_sub(other);
    mul => tt_mul(other);
    neg => tt_neg();
    reciprocal => tt_reciprocal();
    cos => tt_cos();
    sin => tt_sin();
    tanh => tt_tanh();
    /// GELU in the tanh form (config key `hidden_activation`: `gelu_pytorch_tanh`).
    gelu_tanh => tt_gelu_tanh();
    /// Mean over the last dimension, kept as size 1.
    mean_last => tt_mean_last();
    sum => tt_sum();
    /// Softmax over the last dimension, in float32.
    softmax_last_f32 => tt_softmax_last_f32();
    /// Index of the first maximum of the last dimension.
    argmax_last => tt_argmax_last();
    le => tt_le(other);
    gt => tt_gt(other);
    logical_and => tt_logical_and(other);
    logical_not => tt_logical_not();
    /// `self` is a table `[rows, width]`, `indices` any shape of int64.
    embedding => tt_embedding(indices);
    /// `self · weightᵀ`, weight `[out, in]`.
    linear => tt_linear(weight);
    matmul => tt_matmul(other);
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

    // -- what it is --

    /// The element type.
    pub(crate) fn dtype(&self) -> Result<DType> {
        let mut code = -1;
        // SAFETY: the handle is live and `code` is writable.
        check("dtype", unsafe { ffi::tt_dtype(self.raw(), &raw mut code) })?;
        [DType::F32, DType::Bf16, DType::F16, DType::I64, DType::Bool]
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

    // -- making --

    /// int64 values of `shape` on `like`'s device.
    pub(crate) fn from_i64(values: &[i64], shape: &[i64], like: &Self) -> Result<Self> {
        check_count(values.len(), shape)?;
        // SAFETY: `values` holds exactly `shape`; all pointers live for the call.
        Self::made("from_i64", |out| unsafe {
            ffi::tt_from_i64(values.as_ptr(), shape.as_ptr(), shape.len() as i64, like.raw(), out)
        })
    }

    /// float32 values of `shape` on `like`'s device.
    pub(crate) fn from_f32(values: &[f32], shape: &[i64], like: &Self) -> Result<Self> {
        check_count(values.len(), shape)?;
        // SAFETY: `values` holds exactly `shape`; all pointers live for the call.
        Self::made("from_f32", |out| unsafe {
            ffi::tt_from_f32(values.as_ptr(), shape.as_ptr(), shape.len() as i64, like.raw(), out)
        })
    }

    /// Zeros on `like`'s device.
    pub(crate) fn zeros(shape: &[i64], dtype: DType, like: &Self) -> Result<Self> {
        // SAFETY: all pointers live for the call.
        Self::made("zeros", |out| unsafe {
            ffi::tt_zeros(shape.as_ptr(), shape.len() as i64, dtype as i32, like.raw(), out)
        })
    }

    /// Ones on `like`'s device.
    pub(crate) fn ones(shape: &[i64], dtype: DType, like: &Self) -> Result<Self> {
        // SAFETY: all pointers live for the call.
        Self::made("ones", |out| unsafe {
            ffi::tt_ones(shape.as_ptr(), shape.len() as i64, dtype as i32, like.raw(), out)
        })
    }

    /// `start, start + 1, … end - 1` as int64 on `like`'s device.
    pub(crate) fn arange(start: i64, end: i64, like: &Self) -> Result<Self> {
        // SAFETY: the handle is live and `out` is writable.
        Self::made("arange", |out| unsafe { ffi::tt_arange(start, end, like.raw(), out) })
    }

    /// The tensors joined along `dim`.
    pub(crate) fn cat(tensors: &[&Self], dim: i64) -> Result<Self> {
        let raw: Vec<ffi::Raw> = tensors.iter().map(|tensor| tensor.raw()).collect();
        // SAFETY: `raw` holds `len` live handles for the call.
        Self::made("cat", |out| unsafe { ffi::tt_cat(raw.as_ptr(), raw.len() as i64, dim, out) })
    }

    // -- reading and writing --

    /// All values of an int64 tensor, on the host.
    pub(crate) fn read_i64(&self) -> Result<Vec<i64>> {
        let count: i64 = self.sizes()?.iter().product();
        let mut values = vec![0; count as usize];
        // SAFETY: the handle is live and `values` has room for `count` numbers.
        check("read_i64", unsafe { ffi::tt_read_i64(self.raw(), values.as_mut_ptr(), count) })?;
        Ok(values)
    }

    /// Overwrites this tensor's values; views of it see them.
    pub(crate) fn copy_(&self, source: &Self) -> Result<()> {
        // SAFETY: both handles are live; ATen checks the shapes.
        check("copy_", unsafe { ffi::tt_copy_(self.0.as_ptr(), source.raw()) })
    }

    /// `self[indices[0], indices[1], …] = values`, the indices broadcast against each other.
    pub(crate) fn index_put_(&self, indices: &[&Self], values: &Self) -> Result<()> {
        let raw: Vec<ffi::Raw> = indices.iter().map(|index| index.raw()).collect();
        // SAFETY: all handles are live for the call; ATen checks shapes and bounds.
        check("index_put_", unsafe {
            ffi::tt_index_put_(self.0.as_ptr(), raw.as_ptr(), raw.len() as i64, values.raw())
        })
    }

    // -- shapes --

    /// This tensor's elements under another shape.
    pub(crate) fn reshape(&self, shape: &[i64]) -> Result<Self> {
        // SAFETY: the handle and `shape` live for the call.
        Self::made("reshape", |out| unsafe {
            ffi::tt_reshape(self.raw(), shape.as_ptr(), shape.len() as i64, out)
        })
    }

    /// A view that repeats dimensions of size 1.
    pub(crate) fn expand(&self, shape: &[i64]) -> Result<Self> {
        // SAFETY: the handle and `shape` live for the call.
        Self::made("expand", |out| unsafe {
            ffi::tt_expand(self.raw(), shape.as_ptr(), shape.len() as i64, out)
        })
    }

    /// A view with a new dimension of size 1 at `dim`.
    pub(crate) fn unsqueeze(&self, dim: i64) -> Result<Self> {
        // SAFETY: the handle is live.
        Self::made("unsqueeze", |out| unsafe { ffi::tt_unsqueeze(self.raw(), dim, out) })
    }

    /// A view with two dimensions exchanged.
    pub(crate) fn transpose(&self, dim0: i64, dim1: i64) -> Result<Self> {
        // SAFETY: the handle is live.
        Self::made("transpose", |out| unsafe { ffi::tt_transpose(self.raw(), dim0, dim1, out) })
    }

    /// A view of `length` entries of `dim`.
    pub(crate) fn narrow(&self, dim: i64, start: i64, length: i64) -> Result<Self> {
        // SAFETY: the handle is live; ATen checks the range.
        Self::made("narrow", |out| unsafe { ffi::tt_narrow(self.raw(), dim, start, length, out) })
    }

    /// A view of entry `index` of `dim`, which is dropped.
    pub(crate) fn select(&self, dim: i64, index: i64) -> Result<Self> {
        // SAFETY: the handle is live; ATen checks the index.
        Self::made("select", |out| unsafe { ffi::tt_select(self.raw(), dim, index, out) })
    }

    /// Entries of `dim` chosen by `indices`, which broadcasts over the other dimensions.
    pub(crate) fn take_along_dim(&self, indices: &Self, dim: i64) -> Result<Self> {
        // SAFETY: both handles are live; ATen checks shapes and bounds.
        Self::made("take_along_dim", |out| unsafe {
            ffi::tt_take_along_dim(self.raw(), indices.raw(), dim, out)
        })
    }

    // -- arithmetic with a number --

    /// This tensor in another element type.
    pub(crate) fn to_dtype(&self, dtype: DType) -> Result<Self> {
        // SAFETY: the handle is live.
        Self::made("to", |out| unsafe { ffi::tt_to_dtype(self.raw(), dtype as i32, out) })
    }

    /// `self + other`.
    pub(crate) fn add_scalar(&self, other: f64) -> Result<Self> {
        // SAFETY: the handle is live.
        Self::made("add", |out| unsafe { ffi::tt_add_scalar(self.raw(), other, out) })
    }

    /// `self · other`; for 16-bit tensors the number is not rounded to them first.
    pub(crate) fn mul_scalar(&self, other: f64) -> Result<Self> {
        // SAFETY: the handle is live.
        Self::made("mul", |out| unsafe { ffi::tt_mul_scalar(self.raw(), other, out) })
    }

    /// `self / other`.
    pub(crate) fn div_scalar(&self, other: f64) -> Result<Self> {
        // SAFETY: the handle is live.
        Self::made("div", |out| unsafe { ffi::tt_div_scalar(self.raw(), other, out) })
    }

    /// `self` raised to `exponent`.
    pub(crate) fn pow_scalar(&self, exponent: f64) -> Result<Self> {
        // SAFETY: the handle is live.
        Self::made("pow", |out| unsafe { ffi::tt_pow_scalar(self.raw(), exponent, out) })
    }

    /// `base` raised to each element.
    pub(crate) fn scalar_pow(&self, base: f64) -> Result<Self> {
        // SAFETY: the handle is live.
        Self::made("pow", |out| unsafe { ffi::tt_scalar_pow(self.raw(), base, out) })
    }

    /// The remainder of a division by `other`, with `other`'s sign.
    pub(crate) fn remainder_scalar(&self, other: i64) -> Result<Self> {
        // SAFETY: the handle is live.
        Self::made("remainder", |out| unsafe { ffi::tt_remainder_scalar(self.raw(), other, out) })
    }

    /// Where `self >= other`.
    pub(crate) fn ge_scalar(&self, other: i64) -> Result<Self> {
        // SAFETY: the handle is live.
        Self::made("ge", |out| unsafe { ffi::tt_ge_scalar(self.raw(), other, out) })
    }

    /// `value` where `mask` is true, `self` elsewhere.
    pub(crate) fn masked_fill(&self, mask: &Self, value: f64) -> Result<Self> {
        // SAFETY: both handles are live.
        Self::made("masked_fill", |out| unsafe {
            ffi::tt_masked_fill(self.raw(), mask.raw(), value, out)
        })
    }

    /// ATen's fused attention with scale 1.0 and no dropout; `self` is the query
    /// `[B, heads, T, head_dim]`, `mask` broadcasts to `[B, heads, T, S]`.
    pub(crate) fn scaled_dot_product_attention(
        &self,
        key: &Self,
        value: &Self,
        mask: Option<&Self>,
        is_causal: bool,
        enable_gqa: bool,
    ) -> Result<Self> {
        let mask = mask.map_or(std::ptr::null(), Self::raw);
        // SAFETY: all handles are live; a null mask means none.
        Self::made("scaled_dot_product_attention", |out| unsafe {
            ffi::tt_scaled_dot_product_attention(
                self.raw(),
                key.raw(),
                value.raw(),
                mask,
                is_causal,
                enable_gqa,
                out,
            )
        })
    }
}

fn check_count(count: usize, shape: &[i64]) -> Result<()> {
    if shape.iter().product::<i64>() == count as i64 {
        Ok(())
    } else {
        Err(Error::Internal(format!("{count} values for shape {shape:?}")))
    }
}
