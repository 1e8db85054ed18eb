// Fixed-width vectors by the compiler's vector extension: the same source for every instruction set.
//
// Included by several files that are compiled for different instruction sets, therefore everything here has internal
// linkage: a shared inline function would let the linker keep, say, its AVX-512 copy for everybody.
#pragma once

#include <cstddef>
#include <cstdint>

#define SYNCENGINE_INLINE [[gnu::always_inline]] inline

namespace syncengine::kernels {
namespace {

template <class T, size_t kBytes>
struct VectorOf {
  typedef T type __attribute__((vector_size(kBytes)));
};
template <class T, size_t kBytes>
using Vector = typename VectorOf<T, kBytes>::type;

template <class V>
SYNCENGINE_INLINE V load(const std::byte* source) {
  V value;
  __builtin_memcpy(&value, source, sizeof(V));  // an unaligned vector load
  return value;
}

template <class V>
SYNCENGINE_INLINE void store(std::byte* destination, V value) {
  __builtin_memcpy(destination, &value, sizeof(V));
}

// The first `bytes` bytes of a vector; the rest reads as zero and is not stored.
struct PartialByCopy {
  template <class V>
  SYNCENGINE_INLINE static V load_partial(const std::byte* source, size_t bytes) {
    V value{};
    __builtin_memcpy(&value, source, bytes);
    return value;
  }
  template <class V>
  SYNCENGINE_INLINE static void store_partial(std::byte* destination, V value, size_t bytes) {
    __builtin_memcpy(destination, &value, bytes);
  }
};

// The floats of one vector of 16-bit elements.
template <class V>
struct Pair {
  V low, high;
};

}  // namespace
}  // namespace syncengine::kernels
