// Bodies of aten.h: one ATen call each.

#include <ATen/Parallel.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/core/InferenceMode.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <stdexcept>
#include <vector>

#include "guard.h"

using at::Tensor;
using shim::give;
using shim::give_two;
using shim::guard;

struct tt_inference_mode {
  c10::InferenceMode guard;
};

namespace {

constexpr std::array<at::ScalarType, 6> kDtypes = {at::kFloat, at::kBFloat16, at::kHalf,
                                                   at::kLong,  at::kBool,     at::kChar};

at::ScalarType scalar_type(int32_t dtype) { return kDtypes.at(static_cast<size_t>(dtype)); }

at::IntArrayRef shape(const int64_t* sizes, int64_t dim) {
  return at::IntArrayRef(sizes, static_cast<size_t>(dim));
}

at::TensorOptions options(const tt_tensor* like, at::ScalarType dtype) {
  return like->value.options().dtype(dtype).requires_grad(false);
}

// Host values as a tensor on `like`'s device.
template <typename T>
Tensor from_values(const T* values, at::IntArrayRef sizes, at::ScalarType dtype,
                   const tt_tensor* like) {
  Tensor host = at::empty(sizes, at::TensorOptions().dtype(dtype));
  std::copy_n(values, host.numel(), host.template mutable_data_ptr<T>());
  return host.to(like->value.device());
}

}  // namespace

extern "C" {

const char* tt_last_error(void) { return shim::last_error.c_str(); }

// -- handles --

void tt_free(tt_tensor* self) { delete self; }

int32_t tt_alias(const tt_tensor* self, tt_tensor** out) {
  return give(out, [&] { return self->value; });
}

int32_t tt_dtype(const tt_tensor* self, int32_t* out) {
  return guard([&] {
    const auto* found = std::find(kDtypes.begin(), kDtypes.end(), self->value.scalar_type());
    if (found == kDtypes.end()) {
      throw std::invalid_argument(
          std::string("expected float32, bfloat16, float16, int64, bool or int8, "
                      "found ") +
          c10::toString(self->value.scalar_type()));
    }
    *out = static_cast<int32_t>(found - kDtypes.begin());
  });
}

int32_t tt_dim(const tt_tensor* self, int64_t* out) {
  return guard([&] { *out = self->value.dim(); });
}

int32_t tt_sizes(const tt_tensor* self, int64_t* out) {
  return guard([&] { std::copy(self->value.sizes().begin(), self->value.sizes().end(), out); });
}

int32_t tt_device(const tt_tensor* self, char* out, size_t capacity) {
  return guard([&] {
    const std::string text = self->value.device().str();
    const size_t length = std::min(text.size(), capacity - 1);
    std::memcpy(out, text.data(), length);
    out[length] = '\0';
  });
}

int32_t tt_inference_mode_enter(tt_inference_mode** out) {
  return guard([&] { *out = new tt_inference_mode; });
}

void tt_inference_mode_leave(tt_inference_mode* guard) { delete guard; }

int32_t tt_num_threads(int32_t* out) {
  return guard([&] { *out = at::get_num_threads(); });
}

// -- making tensors --

int32_t tt_from_blob(const void* data, const int64_t* sizes, int64_t dim, int32_t dtype,
                     void (*release)(void*), void* owner, tt_tensor** out) {
  return give(out, [&] {
    // ATen has no tensor of const bytes; the model never writes a weight.
    return at::from_blob(
        const_cast<void*>(data), shape(sizes, dim), [release, owner](void*) { release(owner); },
        at::TensorOptions().dtype(scalar_type(dtype)));
  });
}

int32_t tt_from_i64(const int64_t* values, const int64_t* sizes, int64_t dim, const tt_tensor* like,
                    tt_tensor** out) {
  return give(out, [&] { return from_values(values, shape(sizes, dim), at::kLong, like); });
}

int32_t tt_zeros(const int64_t* sizes, int64_t dim, int32_t dtype, const tt_tensor* like,
                 tt_tensor** out) {
  return give(out, [&] { return at::zeros(shape(sizes, dim), options(like, scalar_type(dtype))); });
}

int32_t tt_ones(const int64_t* sizes, int64_t dim, int32_t dtype, const tt_tensor* like,
                tt_tensor** out) {
  return give(out, [&] { return at::ones(shape(sizes, dim), options(like, scalar_type(dtype))); });
}

int32_t tt_scalar(double value, int32_t dtype, const tt_tensor* like, tt_tensor** out) {
  return give(out, [&] { return at::full({}, value, options(like, scalar_type(dtype))); });
}

int32_t tt_arange(int64_t start, int64_t end, const tt_tensor* like, tt_tensor** out) {
  return give(out, [&] { return at::arange(start, end, options(like, at::kLong)); });
}

// -- moving and reading --

int32_t tt_to_dtype(const tt_tensor* self, int32_t dtype, tt_tensor** out) {
  return give(out, [&] { return self->value.to(scalar_type(dtype)); });
}

int32_t tt_type_as(const tt_tensor* self, const tt_tensor* other, tt_tensor** out) {
  return give(out, [&] { return self->value.type_as(other->value); });
}

int32_t tt_to_device_of(const tt_tensor* self, const tt_tensor* other, tt_tensor** out) {
  return give(out, [&] { return self->value.to(other->value.device()); });
}

int32_t tt_to_cpu(const tt_tensor* self, tt_tensor** out) {
  return give(out, [&] { return self->value.to(at::kCPU); });
}

int32_t tt_host_data(tt_tensor* self, int32_t dtype, int64_t count, void** out) {
  return guard([&] {
    const Tensor& value = self->value;
    if (!value.device().is_cpu() || !value.is_contiguous() ||
        value.scalar_type() != scalar_type(dtype) || value.numel() != count) {
      throw std::invalid_argument("expected a contiguous CPU tensor of " + std::to_string(count) +
                                  " values of another type or shape");
    }
    *out = value.mutable_data_ptr();
  });
}

int32_t tt_read_i64(const tt_tensor* self, int64_t* out, int64_t count) {
  return guard([&] {
    const Tensor host = self->value.to(at::kCPU, at::kLong).contiguous();
    if (host.numel() != count) {
      throw std::invalid_argument("expected " + std::to_string(count) + " values, found " +
                                  std::to_string(host.numel()));
    }
    std::copy_n(host.const_data_ptr<int64_t>(), count, out);
  });
}

int32_t tt_copy_(tt_tensor* self, const tt_tensor* source) {
  return guard([&] { self->value.copy_(source->value); });
}

int32_t tt_index_put(const tt_tensor* self, const tt_tensor* const* indices, int64_t count,
                     const tt_tensor* values, tt_tensor** out) {
  return give(out, [&] {
    c10::List<std::optional<Tensor>> list;
    for (int64_t i = 0; i < count; ++i) {
      list.push_back(indices[i]->value);
    }
    return at::index_put(self->value, list, values->value);
  });
}

int32_t tt_index_copy(const tt_tensor* self, int64_t dim, const tt_tensor* index,
                      const tt_tensor* source, tt_tensor** out) {
  return give(out, [&] { return at::index_copy(self->value, dim, index->value, source->value); });
}

int32_t tt_index_select(const tt_tensor* self, int64_t dim, const tt_tensor* index,
                        tt_tensor** out) {
  return give(out, [&] { return at::index_select(self->value, dim, index->value); });
}

// -- shapes --

int32_t tt_reshape(const tt_tensor* self, const int64_t* sizes, int64_t dim, tt_tensor** out) {
  return give(out, [&] { return self->value.reshape(shape(sizes, dim)); });
}

int32_t tt_contiguous(const tt_tensor* self, tt_tensor** out) {
  return give(out, [&] { return self->value.contiguous(); });
}

int32_t tt_expand(const tt_tensor* self, const int64_t* sizes, int64_t dim, tt_tensor** out) {
  return give(out, [&] { return self->value.expand(shape(sizes, dim)); });
}

int32_t tt_unsqueeze(const tt_tensor* self, int64_t dim, tt_tensor** out) {
  return give(out, [&] { return self->value.unsqueeze(dim); });
}

int32_t tt_transpose(const tt_tensor* self, int64_t dim0, int64_t dim1, tt_tensor** out) {
  return give(out, [&] { return self->value.transpose(dim0, dim1); });
}

int32_t tt_narrow(const tt_tensor* self, int64_t dim, int64_t start, int64_t length,
                  tt_tensor** out) {
  return give(out, [&] { return self->value.narrow(dim, start, length); });
}

int32_t tt_select(const tt_tensor* self, int64_t dim, int64_t index, tt_tensor** out) {
  return give(out, [&] { return self->value.select(dim, index); });
}

int32_t tt_cat(const tt_tensor* const* tensors, int64_t count, int64_t dim, tt_tensor** out) {
  return give(out, [&] {
    std::vector<Tensor> list;
    list.reserve(static_cast<size_t>(count));
    for (int64_t i = 0; i < count; ++i) {
      list.push_back(tensors[i]->value);
    }
    return at::cat(list, dim);
  });
}

int32_t tt_take_along_dim(const tt_tensor* self, const tt_tensor* indices, int64_t dim,
                          tt_tensor** out) {
  return give(out, [&] { return at::take_along_dim(self->value, indices->value, dim); });
}

// -- arithmetic --

int32_t tt_add(const tt_tensor* self, const tt_tensor* other, tt_tensor** out) {
  return give(out, [&] { return at::add(self->value, other->value); });
}

int32_t tt_sub(const tt_tensor* self, const tt_tensor* other, tt_tensor** out) {
  return give(out, [&] { return at::sub(self->value, other->value); });
}

int32_t tt_mul(const tt_tensor* self, const tt_tensor* other, tt_tensor** out) {
  return give(out, [&] { return at::mul(self->value, other->value); });
}

int32_t tt_add_scalar(const tt_tensor* self, double other, tt_tensor** out) {
  return give(out, [&] { return at::add(self->value, other); });
}

int32_t tt_add_scalar_i64(const tt_tensor* self, int64_t other, tt_tensor** out) {
  return give(out, [&] { return at::add(self->value, other); });
}

int32_t tt_mul_scalar(const tt_tensor* self, double other, tt_tensor** out) {
  return give(out, [&] { return at::mul(self->value, other); });
}

int32_t tt_div_scalar(const tt_tensor* self, double other, tt_tensor** out) {
  return give(out, [&] { return at::div(self->value, other); });
}

int32_t tt_pow_scalar(const tt_tensor* self, double exponent, tt_tensor** out) {
  return give(out, [&] { return at::pow(self->value, exponent); });
}

int32_t tt_scalar_pow(const tt_tensor* self, double base, tt_tensor** out) {
  return give(out, [&] { return at::pow(base, self->value); });
}

int32_t tt_rsqrt(const tt_tensor* self, tt_tensor** out) {
  return give(out, [&] { return at::rsqrt(self->value); });
}

int32_t tt_reciprocal(const tt_tensor* self, tt_tensor** out) {
  return give(out, [&] { return at::reciprocal(self->value); });
}

int32_t tt_remainder_scalar(const tt_tensor* self, int64_t other, tt_tensor** out) {
  return give(out, [&] { return at::remainder(self->value, other); });
}

int32_t tt_floor_divide_scalar(const tt_tensor* self, int64_t other, tt_tensor** out) {
  return give(out, [&] { return at::floor_divide(self->value, other); });
}

int32_t tt_div(const tt_tensor* self, const tt_tensor* other, tt_tensor** out) {
  return give(out, [&] { return at::div(self->value, other->value); });
}

int32_t tt_abs(const tt_tensor* self, tt_tensor** out) {
  return give(out, [&] { return at::abs(self->value); });
}

int32_t tt_round(const tt_tensor* self, tt_tensor** out) {
  return give(out, [&] { return at::round(self->value); });
}

int32_t tt_clamp_min(const tt_tensor* self, double least, tt_tensor** out) {
  return give(out, [&] {
    const bool whole = at::isIntegralType(self->value.scalar_type(), /*includeBool=*/false);
    return at::clamp_min(self->value,
                         whole ? at::Scalar(static_cast<int64_t>(least)) : at::Scalar(least));
  });
}

int32_t tt_amax_last(const tt_tensor* self, tt_tensor** out) {
  return give(out, [&] { return at::amax(self->value, {-1}, /*keepdim=*/true); });
}

int32_t tt_neg(const tt_tensor* self, tt_tensor** out) {
  return give(out, [&] { return at::neg(self->value); });
}

int32_t tt_cos(const tt_tensor* self, tt_tensor** out) {
  return give(out, [&] { return at::cos(self->value); });
}

int32_t tt_sin(const tt_tensor* self, tt_tensor** out) {
  return give(out, [&] { return at::sin(self->value); });
}

int32_t tt_tanh(const tt_tensor* self, tt_tensor** out) {
  return give(out, [&] { return at::tanh(self->value); });
}

int32_t tt_gelu_tanh(const tt_tensor* self, tt_tensor** out) {
  return give(out, [&] { return at::gelu(self->value, "tanh"); });
}

int32_t tt_mean_last(const tt_tensor* self, tt_tensor** out) {
  return give(out, [&] { return at::mean(self->value, {-1}, /*keepdim=*/true); });
}

int32_t tt_sum(const tt_tensor* self, tt_tensor** out) {
  return give(out, [&] { return at::sum(self->value); });
}

int32_t tt_sum_dim(const tt_tensor* self, int64_t dim, bool keepdim, tt_tensor** out) {
  return give(out, [&] { return at::sum(self->value, {dim}, keepdim); });
}

int32_t tt_softmax_last_f32(const tt_tensor* self, tt_tensor** out) {
  return give(out, [&] { return at::softmax(self->value, -1, at::kFloat); });
}

int32_t tt_argmax_last(const tt_tensor* self, tt_tensor** out) {
  return give(out, [&] { return at::argmax(self->value, -1); });
}

int32_t tt_topk_last(const tt_tensor* self, int64_t k, tt_tensor** values, tt_tensor** indices) {
  return give_two(values, indices, [&] { return at::topk(self->value, k); });
}

int32_t tt_sort_last(const tt_tensor* self, tt_tensor** values, tt_tensor** indices) {
  return give_two(values, indices, [&] { return at::sort(self->value); });
}

int32_t tt_eq(const tt_tensor* self, const tt_tensor* other, tt_tensor** out) {
  return give(out, [&] { return at::eq(self->value, other->value); });
}

int32_t tt_le(const tt_tensor* self, const tt_tensor* other, tt_tensor** out) {
  return give(out, [&] { return at::le(self->value, other->value); });
}

int32_t tt_gt(const tt_tensor* self, const tt_tensor* other, tt_tensor** out) {
  return give(out, [&] { return at::gt(self->value, other->value); });
}

int32_t tt_ge_scalar(const tt_tensor* self, int64_t other, tt_tensor** out) {
  return give(out, [&] { return at::ge(self->value, other); });
}

int32_t tt_logical_and(const tt_tensor* self, const tt_tensor* other, tt_tensor** out) {
  return give(out, [&] { return at::logical_and(self->value, other->value); });
}

int32_t tt_logical_or(const tt_tensor* self, const tt_tensor* other, tt_tensor** out) {
  return give(out, [&] { return at::logical_or(self->value, other->value); });
}

int32_t tt_logical_not(const tt_tensor* self, tt_tensor** out) {
  return give(out, [&] { return at::logical_not(self->value); });
}

int32_t tt_masked_fill(const tt_tensor* self, const tt_tensor* mask, double value,
                       tt_tensor** out) {
  return give(out, [&] { return at::masked_fill(self->value, mask->value, value); });
}

int32_t tt_where(const tt_tensor* condition, const tt_tensor* self, const tt_tensor* other,
                 tt_tensor** out) {
  return give(out, [&] { return at::where(condition->value, self->value, other->value); });
}

int32_t tt_optimization_barrier(const tt_tensor* self, tt_tensor** out) {
  return give(out, [&] {
    if (self->value.device().type() != at::DeviceType::PrivateUse1) {
      return self->value;
    }
    // TorchTPU's own operation, known to the dispatcher once torch_tpu is imported.
    const auto op =
        c10::Dispatcher::singleton().findSchemaOrThrow("tpu::_optimization_barrier", "");
    torch::jit::Stack stack{c10::IValue(c10::List<Tensor>({self->value}))};
    op.callBoxed(&stack);
    return stack.at(0).toTensorList().get(0);
  });
}

// -- matrix products --

int32_t tt_embedding(const tt_tensor* weight, const tt_tensor* indices, tt_tensor** out) {
  return give(out, [&] { return at::embedding(weight->value, indices->value); });
}

int32_t tt_linear(const tt_tensor* input, const tt_tensor* weight, tt_tensor** out) {
  return give(out, [&] { return at::linear(input->value, weight->value); });
}

int32_t tt_matmul(const tt_tensor* self, const tt_tensor* other, tt_tensor** out) {
  return give(out, [&] { return at::matmul(self->value, other->value); });
}

int32_t tt_grouped_mm(const tt_tensor* self, const tt_tensor* weight, const tt_tensor* ends,
                      tt_tensor** out) {
  return give(
      out, [&] { return at::_grouped_mm(self->value, weight->value, ends->value.to(at::kInt)); });
}

int32_t tt_scaled_dot_product_attention(const tt_tensor* query, const tt_tensor* key,
                                        const tt_tensor* value, const tt_tensor* mask,
                                        bool is_causal, double scale, bool enable_gqa,
                                        tt_tensor** out) {
  return give(out, [&] {
    const auto attn_mask = mask ? std::optional<Tensor>(mask->value) : std::nullopt;
    return at::scaled_dot_product_attention(query->value, key->value, value->value, attn_mask,
                                            /*dropout_p=*/0.0, is_causal, scale, enable_gqa);
  });
}

}  // extern "C"
