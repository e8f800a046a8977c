// What both halves of the shim share: the handle's contents and the one exception trap.
#ifndef TORCHTPU_SHIM_GUARD_H
#define TORCHTPU_SHIM_GUARD_H

#include <ATen/ATen.h>

#include <exception>
#include <memory>
#include <string>
#include <tuple>
#include <utility>

#include "aten.h"

struct tt_tensor {
  at::Tensor value;
};

namespace shim {

inline thread_local std::string last_error;

// Runs `body`; turns any C++ exception into a status the C ABI can carry.
template <typename Body>
int32_t guard(Body&& body) noexcept {
  try {
    std::forward<Body>(body)();
    return 0;
  } catch (const c10::Error& error) {
    last_error = error.what_without_backtrace();
  } catch (const std::exception& error) {
    last_error = error.what();
  } catch (...) {
    last_error = "unknown C++ exception";
  }
  return 1;
}

// Runs `make` and hands its tensor out as a new handle.
template <typename Make>
int32_t give(tt_tensor** out, Make&& make) noexcept {
  return guard([&] { *out = new tt_tensor{std::forward<Make>(make)()}; });
}

// The same for an operation with two results; none is handed out when it fails.
template <typename Make>
int32_t give_two(tt_tensor** first, tt_tensor** second, Make&& make) noexcept {
  return guard([&] {
    auto both = std::forward<Make>(make)();
    auto held = std::make_unique<tt_tensor>(tt_tensor{std::get<0>(std::move(both))});
    *second = new tt_tensor{std::get<1>(std::move(both))};
    *first = held.release();
  });
}

}  // namespace shim

#endif
