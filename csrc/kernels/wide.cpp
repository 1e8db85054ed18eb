#include <cstring>

#include "kernels/element.h"
#include "kernels/fp_state.h"
#include "kernels/reduce.h"

namespace syncengine::kernels {

namespace {

// Not inlined: see fp_state.h. Nor is narrow_all().
template <class Element>
[[gnu::noinline]] void widen_all(float* destination, const std::byte* source, size_t count) {
  for (size_t i = 0; i < count; ++i) {
    uint16_t half;
    std::memcpy(&half, source + i * sizeof(half), sizeof(half));
    destination[i] = Element::widen(half);
  }
}

template <class Element>
[[gnu::noinline]] void narrow_all(std::byte* destination, const float* source, size_t count) {
  for (size_t i = 0; i < count; ++i) {
    const uint16_t half = Element::narrow(source[i]);
    std::memcpy(destination + i * sizeof(half), &half, sizeof(half));
  }
}

}  // namespace

void widen(DType dtype, float* destination, const void* source, size_t count) {
  const DefaultFpState state;
  const auto all = dtype == DType::BFloat16 ? widen_all<BFloat16Element> : widen_all<Float16Element>;
  all(destination, static_cast<const std::byte*>(source), count);
}

void narrow(DType dtype, void* destination, const float* source, size_t count) {
  const DefaultFpState state;
  const auto all = dtype == DType::BFloat16 ? narrow_all<BFloat16Element> : narrow_all<Float16Element>;
  all(static_cast<std::byte*>(destination), source, count);
}

}  // namespace syncengine::kernels
