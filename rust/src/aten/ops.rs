//! ATen's operations as methods of [`Tensor`], one for each function of `shim/aten.h` that makes a tensor.

use half::bf16;

use super::{DType, Tensor, check, ffi};
use crate::error::{Error, Result};

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
    /// This tensor on `other`'s device.
    to_device_of => tt_to_device_of(other);
    /// This tensor with `other`'s element type, on `other`'s device.
    type_as => tt_type_as(other);
    add => tt_add(other);
    sub => tt_sub(other);
    mul => tt_mul(other);
    div => tt_div(other);
    neg => tt_neg();
    abs => tt_abs();
    /// To the nearest whole number, halves to even.
    round => tt_round();
    rsqrt => tt_rsqrt();
    reciprocal => tt_reciprocal();
    cos => tt_cos();
    sin => tt_sin();
    tanh => tt_tanh();
    /// GELU in the tanh form (config key `hidden_activation`: `gelu_pytorch_tanh`).
    gelu_tanh => tt_gelu_tanh();
    /// Mean over the last dimension, kept as size 1.
    mean_last => tt_mean_last();
    sum => tt_sum();
    /// Largest of the last dimension, kept as size 1.
    amax_last => tt_amax_last();
    /// Softmax over the last dimension, in float32.
    softmax_last_f32 => tt_softmax_last_f32();
    /// Index of the first maximum of the last dimension.
    argmax_last => tt_argmax_last();
    eq => tt_eq(other);
    le => tt_le(other);
    gt => tt_gt(other);
    logical_and => tt_logical_and(other);
    logical_or => tt_logical_or(other);
    logical_not => tt_logical_not();
    /// `chosen` where `self` is true, `other` elsewhere.
    where_ => tt_where(chosen, other);
    /// Itself, but TorchTPU's compiler may not fuse across it.
    optimization_barrier => tt_optimization_barrier();
    contiguous => tt_contiguous();
    /// `self` is a table `[rows, width]`, `indices` any shape of int64.
    embedding => tt_embedding(indices);
    /// `self · weightᵀ`, weight `[out, in]`.
    linear => tt_linear(weight);
    matmul => tt_matmul(other);
    /// Rows `[S, in]` in groups, `weight` `[groups, in, out]`: those up to `ends[0]` times the first weight, those up to
    /// `ends[1]` times the second, and so on.
    grouped_mm => tt_grouped_mm(weight, ends);
}

impl Tensor {
    // -- making --

    /// int64 values of `shape` on `like`'s device.
    pub(crate) fn from_i64(values: &[i64], shape: &[i64], like: &Self) -> Result<Self> {
        check_count(values.len(), shape)?;
        // SAFETY: `values` holds exactly `shape`; all pointers live for the call.
        Self::made("from_i64", |out| unsafe {
            ffi::tt_from_i64(values.as_ptr(), shape.as_ptr(), shape.len() as i64, like.raw(), out)
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

    /// One number, without dimensions, on `like`'s device.
    pub(crate) fn scalar(value: f64, dtype: DType, like: &Self) -> Result<Self> {
        // SAFETY: the handle is live and `out` is writable.
        Self::made("full", |out| unsafe { ffi::tt_scalar(value, dtype as i32, like.raw(), out) })
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

    /// What `f` makes of the values of a contiguous bfloat16 tensor on the CPU.
    pub(crate) fn with_bf16<R>(&self, f: impl FnOnce(&[bf16]) -> R) -> Result<R> {
        let count: i64 = self.sizes()?.iter().product();
        let mut data = std::ptr::null_mut();
        let dtype = DType::Bf16 as i32;
        // SAFETY: the handle is live and `data` is writable for the call.
        check("data", unsafe { ffi::tt_host_data(self.0.as_ptr(), dtype, count, &raw mut data) })?;
        // An empty tensor may have no address.
        let data = if count == 0 { std::ptr::NonNull::dangling().as_ptr() } else { data.cast() };
        // SAFETY: `data` points to `count` values, which live as long as the handle and which nothing writes meanwhile:
        // only this thread has the tensor.
        Ok(f(unsafe { std::slice::from_raw_parts(data, count as usize) }))
    }

    /// Overwrites this tensor's values; views of it see them.
    pub(crate) fn copy_(&self, source: &Self) -> Result<()> {
        // SAFETY: both handles are live; ATen checks the shapes.
        check("copy_", unsafe { ffi::tt_copy_(self.0.as_ptr(), source.raw()) })
    }

    /// This tensor with `self[indices[0], indices[1], …] = values`, the indices broadcast against each
    /// other.
    pub(crate) fn index_put(&self, indices: &[&Self], values: &Self) -> Result<Self> {
        let raw: Vec<ffi::Raw> = indices.iter().map(|index| index.raw()).collect();
        // SAFETY: all handles are live for the call; ATen checks shapes and bounds.
        Self::made("index_put", |out| unsafe {
            ffi::tt_index_put(self.raw(), raw.as_ptr(), raw.len() as i64, values.raw(), out)
        })
    }

    /// This tensor with entries `index` `[N]` of `dim` replaced by those of `source`.
    pub(crate) fn index_copy(&self, dim: i64, index: &Self, source: &Self) -> Result<Self> {
        // SAFETY: all handles are live; ATen checks shapes and bounds.
        Self::made("index_copy", |out| unsafe {
            ffi::tt_index_copy(self.raw(), dim, index.raw(), source.raw(), out)
        })
    }

    /// Entries `index` `[N]` of `dim`.
    pub(crate) fn index_select(&self, dim: i64, index: &Self) -> Result<Self> {
        // SAFETY: both handles are live; ATen checks the bounds.
        Self::made("index_select", |out| unsafe {
            ffi::tt_index_select(self.raw(), dim, index.raw(), out)
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

    /// `self + other` of whole numbers.
    pub(crate) fn add_scalar_i64(&self, other: i64) -> Result<Self> {
        // SAFETY: the handle is live.
        Self::made("add", |out| unsafe { ffi::tt_add_scalar_i64(self.raw(), other, out) })
    }

    /// The larger of each element and `least`.
    pub(crate) fn clamp_min(&self, least: f64) -> Result<Self> {
        // SAFETY: the handle is live.
        Self::made("clamp_min", |out| unsafe { ffi::tt_clamp_min(self.raw(), least, out) })
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

    /// The quotient of whole numbers, rounded down.
    pub(crate) fn floor_divide_scalar(&self, other: i64) -> Result<Self> {
        // SAFETY: the handle is live.
        Self::made("floor_divide", |out| unsafe {
            ffi::tt_floor_divide_scalar(self.raw(), other, out)
        })
    }

    /// The sum over `dim`, which stays as size 1 with `keepdim`.
    pub(crate) fn sum_dim(&self, dim: i64, keepdim: bool) -> Result<Self> {
        // SAFETY: the handle is live.
        Self::made("sum", |out| unsafe { ffi::tt_sum_dim(self.raw(), dim, keepdim, out) })
    }

    /// The `k` largest of the last dimension, the largest first, and where they stand.
    pub(crate) fn topk_last(&self, k: i64) -> Result<(Self, Self)> {
        // SAFETY: the handle is live and both outs are writable.
        Self::made_two("topk", |values, indices| unsafe {
            ffi::tt_topk_last(self.raw(), k, values, indices)
        })
    }

    /// The last dimension in rising order, and where each value stood.
    pub(crate) fn sort_last(&self) -> Result<(Self, Self)> {
        // SAFETY: the handle is live and both outs are writable.
        Self::made_two("sort", |values, indices| unsafe {
            ffi::tt_sort_last(self.raw(), values, indices)
        })
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

    /// ATen's fused attention without dropout; `self` is the query `[B, heads, T, head_dim]`, `mask` broadcasts to
    /// `[B, heads, T, S]`, `scale` multiplies the scores.
    pub(crate) fn scaled_dot_product_attention(
        &self,
        key: &Self,
        value: &Self,
        mask: Option<&Self>,
        (is_causal, scale, enable_gqa): (bool, f64, bool),
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
                scale,
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
