//! The shim's C ABI as Rust sees it: one declaration for each function of `shim/aten.h`, in its order.

use std::ffi::{c_char, c_void};

/// Opaque: a boxed `at::Tensor`.
#[repr(C)]
pub(super) struct TtTensor {
    _opaque: [u8; 0],
}

/// Opaque: a boxed `c10::InferenceMode`.
#[repr(C)]
pub(super) struct TtInferenceMode {
    _opaque: [u8; 0],
}

pub(super) type Raw = *const TtTensor;
pub(super) type Out = *mut *mut TtTensor;

unsafe extern "C" {
    pub(super) fn tt_last_error() -> *const c_char;

    pub(super) fn tt_free(self_: *mut TtTensor);
    pub(super) fn tt_alias(self_: Raw, out: Out) -> i32;
    pub(super) fn tt_dtype(self_: Raw, out: *mut i32) -> i32;
    pub(super) fn tt_dim(self_: Raw, out: *mut i64) -> i32;
    pub(super) fn tt_sizes(self_: Raw, out: *mut i64) -> i32;
    pub(super) fn tt_device(self_: Raw, out: *mut c_char, capacity: usize) -> i32;
    pub(super) fn tt_inference_mode_enter(out: *mut *mut TtInferenceMode) -> i32;
    pub(super) fn tt_inference_mode_leave(guard: *mut TtInferenceMode);
    pub(super) fn tt_num_threads(out: *mut i32) -> i32;

    pub(super) fn tt_from_blob(
        data: *const c_void,
        sizes: *const i64,
        dim: i64,
        dtype: i32,
        release: extern "C" fn(*mut c_void),
        owner: *mut c_void,
        out: Out,
    ) -> i32;
    pub(super) fn tt_from_i64(
        values: *const i64,
        sizes: *const i64,
        dim: i64,
        like: Raw,
        out: Out,
    ) -> i32;
    pub(super) fn tt_zeros(sizes: *const i64, dim: i64, dtype: i32, like: Raw, out: Out) -> i32;
    pub(super) fn tt_ones(sizes: *const i64, dim: i64, dtype: i32, like: Raw, out: Out) -> i32;
    pub(super) fn tt_scalar(value: f64, dtype: i32, like: Raw, out: Out) -> i32;
    pub(super) fn tt_arange(start: i64, end: i64, like: Raw, out: Out) -> i32;

    pub(super) fn tt_to_dtype(self_: Raw, dtype: i32, out: Out) -> i32;
    pub(super) fn tt_type_as(self_: Raw, other: Raw, out: Out) -> i32;
    pub(super) fn tt_to_device_of(self_: Raw, other: Raw, out: Out) -> i32;
    pub(super) fn tt_to_cpu(self_: Raw, out: Out) -> i32;
    pub(super) fn tt_host_data(
        self_: *mut TtTensor,
        dtype: i32,
        count: i64,
        out: *mut *mut c_void,
    ) -> i32;
    pub(super) fn tt_read_i64(self_: Raw, out: *mut i64, count: i64) -> i32;
    pub(super) fn tt_copy_(self_: *mut TtTensor, source: Raw) -> i32;
    pub(super) fn tt_index_put(
        self_: Raw,
        indices: *const Raw,
        count: i64,
        values: Raw,
        out: Out,
    ) -> i32;
    pub(super) fn tt_index_copy(self_: Raw, dim: i64, index: Raw, source: Raw, out: Out) -> i32;
    pub(super) fn tt_index_select(self_: Raw, dim: i64, index: Raw, out: Out) -> i32;

    pub(super) fn tt_reshape(self_: Raw, sizes: *const i64, dim: i64, out: Out) -> i32;
    pub(super) fn tt_contiguous(self_: Raw, out: Out) -> i32;
    pub(super) fn tt_expand(self_: Raw, sizes: *const i64, dim: i64, out: Out) -> i32;
    pub(super) fn tt_unsqueeze(self_: Raw, dim: i64, out: Out) -> i32;
    pub(super) fn tt_transpose(self_: Raw, dim0: i64, dim1: i64, out: Out) -> i32;
    pub(super) fn tt_narrow(self_: Raw, dim: i64, start: i64, length: i64, out: Out) -> i32;
    pub(super) fn tt_select(self_: Raw, dim: i64, index: i64, out: Out) -> i32;
    pub(super) fn tt_cat(tensors: *const Raw, count: i64, dim: i64, out: Out) -> i32;
    pub(super) fn tt_take_along_dim(self_: Raw, indices: Raw, dim: i64, out: Out) -> i32;

    pub(super) fn tt_add(self_: Raw, other: Raw, out: Out) -> i32;
    pub(super) fn tt_sub(self_: Raw, other: Raw, out: Out) -> i32;
    pub(super) fn tt_mul(self_: Raw, other: Raw, out: Out) -> i32;
    pub(super) fn tt_add_scalar(self_: Raw, other: f64, out: Out) -> i32;
    pub(super) fn tt_add_scalar_i64(self_: Raw, other: i64, out: Out) -> i32;
    pub(super) fn tt_mul_scalar(self_: Raw, other: f64, out: Out) -> i32;
    pub(super) fn tt_div_scalar(self_: Raw, other: f64, out: Out) -> i32;
    pub(super) fn tt_pow_scalar(self_: Raw, exponent: f64, out: Out) -> i32;
    pub(super) fn tt_scalar_pow(self_: Raw, base: f64, out: Out) -> i32;
    pub(super) fn tt_rsqrt(self_: Raw, out: Out) -> i32;
    pub(super) fn tt_reciprocal(self_: Raw, out: Out) -> i32;
    pub(super) fn tt_remainder_scalar(self_: Raw, other: i64, out: Out) -> i32;
    pub(super) fn tt_floor_divide_scalar(self_: Raw, other: i64, out: Out) -> i32;
    pub(super) fn tt_div(self_: Raw, other: Raw, out: Out) -> i32;
    pub(super) fn tt_abs(self_: Raw, out: Out) -> i32;
    pub(super) fn tt_round(self_: Raw, out: Out) -> i32;
    pub(super) fn tt_clamp_min(self_: Raw, least: f64, out: Out) -> i32;
    pub(super) fn tt_amax_last(self_: Raw, out: Out) -> i32;
    pub(super) fn tt_neg(self_: Raw, out: Out) -> i32;
    pub(super) fn tt_cos(self_: Raw, out: Out) -> i32;
    pub(super) fn tt_sin(self_: Raw, out: Out) -> i32;
    pub(super) fn tt_tanh(self_: Raw, out: Out) -> i32;
    pub(super) fn tt_gelu_tanh(self_: Raw, out: Out) -> i32;
    pub(super) fn tt_mean_last(self_: Raw, out: Out) -> i32;
    pub(super) fn tt_sum(self_: Raw, out: Out) -> i32;
    pub(super) fn tt_sum_dim(self_: Raw, dim: i64, keepdim: bool, out: Out) -> i32;
    pub(super) fn tt_softmax_last_f32(self_: Raw, out: Out) -> i32;
    pub(super) fn tt_argmax_last(self_: Raw, out: Out) -> i32;
    pub(super) fn tt_topk_last(self_: Raw, k: i64, values: Out, indices: Out) -> i32;
    pub(super) fn tt_sort_last(self_: Raw, values: Out, indices: Out) -> i32;
    pub(super) fn tt_eq(self_: Raw, other: Raw, out: Out) -> i32;
    pub(super) fn tt_le(self_: Raw, other: Raw, out: Out) -> i32;
    pub(super) fn tt_gt(self_: Raw, other: Raw, out: Out) -> i32;
    pub(super) fn tt_ge_scalar(self_: Raw, other: i64, out: Out) -> i32;
    pub(super) fn tt_logical_and(self_: Raw, other: Raw, out: Out) -> i32;
    pub(super) fn tt_logical_or(self_: Raw, other: Raw, out: Out) -> i32;
    pub(super) fn tt_logical_not(self_: Raw, out: Out) -> i32;
    pub(super) fn tt_masked_fill(self_: Raw, mask: Raw, value: f64, out: Out) -> i32;

    pub(super) fn tt_where(condition: Raw, self_: Raw, other: Raw, out: Out) -> i32;
    pub(super) fn tt_optimization_barrier(self_: Raw, out: Out) -> i32;

    pub(super) fn tt_embedding(weight: Raw, indices: Raw, out: Out) -> i32;
    pub(super) fn tt_linear(input: Raw, weight: Raw, out: Out) -> i32;
    pub(super) fn tt_matmul(self_: Raw, other: Raw, out: Out) -> i32;
    pub(super) fn tt_grouped_mm(self_: Raw, weight: Raw, ends: Raw, out: Out) -> i32;
    pub(super) fn tt_scaled_dot_product_attention(
        query: Raw,
        key: Raw,
        value: Raw,
        mask: Raw,
        is_causal: bool,
        scale: f64,
        enable_gqa: bool,
        out: Out,
    ) -> i32;

    #[cfg(feature = "python")]
    pub(super) fn tt_from_python(object: *mut c_void, out: Out) -> i32;
    #[cfg(feature = "python")]
    pub(super) fn tt_to_python(self_: Raw, out: *mut *mut c_void) -> i32;
}
