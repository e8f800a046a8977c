/* The few dozen ATen calls of the model, behind a C ABI.
 *
 * Every function returns 0, or 1 with its text in tt_last_error(); results go through
 * out-parameters, which are untouched on failure. Nothing throws across this border. The shim
 * translates and does not decide: no arithmetic, no branch on model facts, no device special cases.
 * Argument order is ATen's. */
#ifndef TORCHTPU_SHIM_ATEN_H
#define TORCHTPU_SHIM_ATEN_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* A tensor handle; owned by whoever received it, freed with tt_free. */
typedef struct tt_tensor tt_tensor;
/* The inference-mode guard of one thread. */
typedef struct tt_inference_mode tt_inference_mode;

/* Data types the model uses; the numbers are this ABI's own. */
enum { TT_F32 = 0, TT_BF16 = 1, TT_F16 = 2, TT_I64 = 3, TT_BOOL = 4, TT_I8 = 5 };

/* The text of this thread's last failure; valid until its next one. */
const char* tt_last_error(void);

/* -- handles ------------------------------------------------------------------------------------
 */
void tt_free(tt_tensor* self);
int32_t tt_alias(const tt_tensor* self, tt_tensor** out);
int32_t tt_dtype(const tt_tensor* self, int32_t* out);
int32_t tt_dim(const tt_tensor* self, int64_t* out);
/* Writes tt_dim(self) sizes. */
int32_t tt_sizes(const tt_tensor* self, int64_t* out);
/* The device as torch prints it ("cpu", "tpu:0"), cut at `capacity` bytes including the final zero.
 */
int32_t tt_device(const tt_tensor* self, char* out, size_t capacity);
int32_t tt_inference_mode_enter(tt_inference_mode** out);
void tt_inference_mode_leave(tt_inference_mode* guard);
int32_t tt_num_threads(int32_t* out);

/* -- making tensors -----------------------------------------------------------------------------
 */
/* A CPU tensor over borrowed bytes; `release(owner)` runs when the last view of them is gone. */
int32_t tt_from_blob(const void* data, const int64_t* sizes, int64_t dim, int32_t dtype,
                     void (*release)(void*), void* owner, tt_tensor** out);
int32_t tt_from_i64(const int64_t* values, const int64_t* sizes, int64_t dim, const tt_tensor* like,
                    tt_tensor** out);
int32_t tt_zeros(const int64_t* sizes, int64_t dim, int32_t dtype, const tt_tensor* like,
                 tt_tensor** out);
int32_t tt_ones(const int64_t* sizes, int64_t dim, int32_t dtype, const tt_tensor* like,
                tt_tensor** out);
/* One number, without dimensions. */
int32_t tt_scalar(double value, int32_t dtype, const tt_tensor* like, tt_tensor** out);
int32_t tt_arange(int64_t start, int64_t end, const tt_tensor* like, tt_tensor** out);

/* -- moving and reading -------------------------------------------------------------------------
 */
int32_t tt_to_dtype(const tt_tensor* self, int32_t dtype, tt_tensor** out);
int32_t tt_type_as(const tt_tensor* self, const tt_tensor* other, tt_tensor** out);
int32_t tt_to_device_of(const tt_tensor* self, const tt_tensor* other, tt_tensor** out);
int32_t tt_to_cpu(const tt_tensor* self, tt_tensor** out);
/* Copies `count` int64 values of a tensor on any device to the host. */
/* The address of `count` values of a contiguous CPU tensor of `dtype`. */
int32_t tt_host_data(tt_tensor* self, int32_t dtype, int64_t count, void** out);
int32_t tt_read_i64(const tt_tensor* self, int64_t* out, int64_t count);
int32_t tt_copy_(tt_tensor* self, const tt_tensor* source);
int32_t tt_index_put(const tt_tensor* self, const tt_tensor* const* indices, int64_t count,
                     const tt_tensor* values, tt_tensor** out);
int32_t tt_index_copy(const tt_tensor* self, int64_t dim, const tt_tensor* index,
                      const tt_tensor* source, tt_tensor** out);
int32_t tt_index_select(const tt_tensor* self, int64_t dim, const tt_tensor* index,
                        tt_tensor** out);

/* -- shapes -------------------------------------------------------------------------------------
 */
int32_t tt_reshape(const tt_tensor* self, const int64_t* sizes, int64_t dim, tt_tensor** out);
int32_t tt_contiguous(const tt_tensor* self, tt_tensor** out);
int32_t tt_expand(const tt_tensor* self, const int64_t* sizes, int64_t dim, tt_tensor** out);
int32_t tt_unsqueeze(const tt_tensor* self, int64_t dim, tt_tensor** out);
int32_t tt_transpose(const tt_tensor* self, int64_t dim0, int64_t dim1, tt_tensor** out);
int32_t tt_narrow(const tt_tensor* self, int64_t dim, int64_t start, int64_t length,
                  tt_tensor** out);
int32_t tt_select(const tt_tensor* self, int64_t dim, int64_t index, tt_tensor** out);
int32_t tt_cat(const tt_tensor* const* tensors, int64_t count, int64_t dim, tt_tensor** out);
int32_t tt_take_along_dim(const tt_tensor* self, const tt_tensor* indices, int64_t dim,
                          tt_tensor** out);

/* -- arithmetic ---------------------------------------------------------------------------------
 */
int32_t tt_add(const tt_tensor* self, const tt_tensor* other, tt_tensor** out);
int32_t tt_sub(const tt_tensor* self, const tt_tensor* other, tt_tensor** out);
int32_t tt_mul(const tt_tensor* self, const tt_tensor* other, tt_tensor** out);
int32_t tt_add_scalar(const tt_tensor* self, double other, tt_tensor** out);
int32_t tt_add_scalar_i64(const tt_tensor* self, int64_t other, tt_tensor** out);
int32_t tt_mul_scalar(const tt_tensor* self, double other, tt_tensor** out);
int32_t tt_div_scalar(const tt_tensor* self, double other, tt_tensor** out);
int32_t tt_pow_scalar(const tt_tensor* self, double exponent, tt_tensor** out);
/* base ** self */
int32_t tt_scalar_pow(const tt_tensor* self, double base, tt_tensor** out);
int32_t tt_rsqrt(const tt_tensor* self, tt_tensor** out);
int32_t tt_reciprocal(const tt_tensor* self, tt_tensor** out);
int32_t tt_remainder_scalar(const tt_tensor* self, int64_t other, tt_tensor** out);
int32_t tt_floor_divide_scalar(const tt_tensor* self, int64_t other, tt_tensor** out);
int32_t tt_div(const tt_tensor* self, const tt_tensor* other, tt_tensor** out);
int32_t tt_abs(const tt_tensor* self, tt_tensor** out);
int32_t tt_round(const tt_tensor* self, tt_tensor** out);
int32_t tt_clamp_min(const tt_tensor* self, double least, tt_tensor** out);
/* Largest of the last dimension, which is kept. */
int32_t tt_amax_last(const tt_tensor* self, tt_tensor** out);
int32_t tt_neg(const tt_tensor* self, tt_tensor** out);
int32_t tt_cos(const tt_tensor* self, tt_tensor** out);
int32_t tt_sin(const tt_tensor* self, tt_tensor** out);
int32_t tt_tanh(const tt_tensor* self, tt_tensor** out);
/* gelu with the tanh approximation. */
int32_t tt_gelu_tanh(const tt_tensor* self, tt_tensor** out);
/* Mean over the last dimension, which is kept. */
int32_t tt_mean_last(const tt_tensor* self, tt_tensor** out);
int32_t tt_sum(const tt_tensor* self, tt_tensor** out);
int32_t tt_sum_dim(const tt_tensor* self, int64_t dim, bool keepdim, tt_tensor** out);
/* Softmax over the last dimension, computed and returned in float32. */
int32_t tt_softmax_last_f32(const tt_tensor* self, tt_tensor** out);
int32_t tt_argmax_last(const tt_tensor* self, tt_tensor** out);
/* Of the last dimension: the k largest, the largest first, and where they stand. */
int32_t tt_topk_last(const tt_tensor* self, int64_t k, tt_tensor** values, tt_tensor** indices);
/* The last dimension in rising order, and where each value stood. */
int32_t tt_sort_last(const tt_tensor* self, tt_tensor** values, tt_tensor** indices);
int32_t tt_eq(const tt_tensor* self, const tt_tensor* other, tt_tensor** out);
int32_t tt_le(const tt_tensor* self, const tt_tensor* other, tt_tensor** out);
int32_t tt_gt(const tt_tensor* self, const tt_tensor* other, tt_tensor** out);
int32_t tt_ge_scalar(const tt_tensor* self, int64_t other, tt_tensor** out);
int32_t tt_logical_and(const tt_tensor* self, const tt_tensor* other, tt_tensor** out);
int32_t tt_logical_or(const tt_tensor* self, const tt_tensor* other, tt_tensor** out);
int32_t tt_logical_not(const tt_tensor* self, tt_tensor** out);
int32_t tt_masked_fill(const tt_tensor* self, const tt_tensor* mask, double value, tt_tensor** out);
/* `self` where the condition holds, `other` elsewhere. */
int32_t tt_where(const tt_tensor* condition, const tt_tensor* self, const tt_tensor* other,
                 tt_tensor** out);
/* torch.ops.tpu._optimization_barrier of one tensor on a TPU; elsewhere nothing is fused, and this
 * is an alias. */
int32_t tt_optimization_barrier(const tt_tensor* self, tt_tensor** out);

/* -- matrix products ----------------------------------------------------------------------------
 */
int32_t tt_embedding(const tt_tensor* weight, const tt_tensor* indices, tt_tensor** out);
int32_t tt_linear(const tt_tensor* input, const tt_tensor* weight, tt_tensor** out);
int32_t tt_matmul(const tt_tensor* self, const tt_tensor* other, tt_tensor** out);
/* Rows [S, in] that stand in groups, each with its own weight of [groups, in, out]; ends [groups]
 * are int64. */
int32_t tt_grouped_mm(const tt_tensor* self, const tt_tensor* weight, const tt_tensor* ends,
                      tt_tensor** out);
/* scale is 1.0 and dropout 0.0, as Gemma 4 calls it; `mask` may be null. */
int32_t tt_scaled_dot_product_attention(const tt_tensor* query, const tt_tensor* key,
                                        const tt_tensor* value, const tt_tensor* mask,
                                        bool is_causal, double scale, bool enable_gqa,
                                        tt_tensor** out);

/* -- Python (shim/python.cpp, only with the feature `python`) -------------------------------------
 */
/* `object` is a borrowed PyObject*; it fails when that is no torch.Tensor. The GIL is held. */
int32_t tt_from_python(void* object, tt_tensor** out);
/* A new reference to a torch.Tensor that shares storage with `self`. The GIL is held. */
int32_t tt_to_python(const tt_tensor* self, void** out);

#ifdef __cplusplus
}
#endif
#endif
