#include <cstring>
#include <type_traits>

#include "base/processor.h"
#include "kernels/element.h"
#include "kernels/fp_state.h"
#include "kernels/reduce.h"
#if SYNCENGINE_AARCH64
#include "kernels/neon.h"
#endif

namespace syncengine::kernels {

namespace {

[[maybe_unused]] constexpr size_t kBlock = 8;  // a vector of 16-bit elements, for ARM

// widen_all() and narrow_all() are not inlined: see fp_state.h.
template <class Element>
[[gnu::noinline]] void widen_all(float* destination, const std::byte* source, size_t count) {
  size_t i = 0;
#if SYNCENGINE_AARCH64
  if constexpr (std::is_same_v<Element, Float16Element>)  // the compiler makes vectors of bfloat16 by itself
    for (Pair<Neon::Floats> floats; count - i >= kBlock; i += kBlock) {
      floats = Neon::from_float16(load<Neon::Words>(source + i * sizeof(uint16_t)));
      std::memcpy(destination + i, &floats, sizeof(floats));
    }
#endif
  for (; i < count; ++i) {
    uint16_t half;
    std::memcpy(&half, source + i * sizeof(half), sizeof(half));
    destination[i] = Element::widen(half);
  }
}

template <class Element>
[[gnu::noinline]] void narrow_all(std::byte* destination, const float* source, size_t count) {
  size_t i = 0;
#if SYNCENGINE_AARCH64
  if constexpr (std::is_same_v<Element, Float16Element>)
    for (Pair<Neon::Floats> floats; count - i >= kBlock; i += kBlock) {
      std::memcpy(&floats, source + i, sizeof(floats));
      store(destination + i * sizeof(uint16_t), Neon::to_float16(floats));
    }
#endif
  for (; i < count; ++i) {
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
