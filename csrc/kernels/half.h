// float16 and bfloat16 to and from float32, a vector at a time: round to nearest even, subnormals kept, NaN stays NaN.
//
// The rounding mode must be to nearest and subnormals must not be flushed (fp_state.h): tiny float16 values are rounded
// by a float32 addition.
#pragma once

#include <cstddef>
#include <cstdint>

// Fixed-width vectors by the compiler's vector extension: the same source for every instruction set.
//
// Included by several files that are compiled for different instruction sets, therefore everything here has internal
// linkage: a shared inline function would let the linker keep, say, its AVX-512 copy for everybody.

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

// Loads and stores the first `bytes` bytes of a vector; the rest is read as zero and is not stored.
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

// Two 16-bit elements share a 32-bit word. Taking the even and the odd ones apart, instead of the lower and the upper
// half of a vector, leaves each element in its own word: shifts and masks, no shuffles. Which of the two is first in
// memory (byte order) does not matter.
template <size_t kBytes>
struct HalfConversions {
  static constexpr size_t kVectorBytes = kBytes;
  using Floats = Vector<float, kBytes>;
  using Words = Vector<uint32_t, kBytes>;
  using Pair = kernels::Pair<Floats>;
  using BFloat16Conversions = HalfConversions;

  SYNCENGINE_INLINE static Pair from_bfloat16(Words x) { return {(Floats)(x << 16), (Floats)(x & 0xffff0000)}; }
  SYNCENGINE_INLINE static Words to_bfloat16(Pair x) {
    return (round_to_bfloat16(x.low) >> 16) | (round_to_bfloat16(x.high) & 0xffff0000);
  }

  // Narrows floats whose results are known to be finite, without a check for NaN.
  SYNCENGINE_INLINE static Words finite_to_bfloat16(Pair x) {
    return (rounded_to_bfloat16(x.low) >> 16) | (rounded_to_bfloat16(x.high) & 0xffff0000);
  }

  SYNCENGINE_INLINE static Pair from_float16(Words x) {
    return {float16_to_float32(x & 0xffff), float16_to_float32(x >> 16)};
  }
  SYNCENGINE_INLINE static Words to_float16(Pair x) {
    return float32_to_float16(x.low) | (float32_to_float16(x.high) << 16);
  }

 private:
  // Returns the result in the upper 16 bits. AVX512-BF16 has an instruction for this, but it flushes subnormals.
  SYNCENGINE_INLINE static Words round_to_bfloat16(Floats x) {
    return x != x ? (Words)x | 0x00400000 : rounded_to_bfloat16(x);
  }
  SYNCENGINE_INLINE static Words rounded_to_bfloat16(Floats x) {
    const Words bits = (Words)x;
    return bits + 0x7fff + ((bits >> 16) & 1);
  }

  SYNCENGINE_INLINE static Floats float16_to_float32(Words half) {
    const Words magnitude = (half & 0x7fff) << 13;  // the exponent now stands where float32 has its own
    const Words normal = magnitude + ((127u - 15u) << 23);
    const Words infinite_or_nan = magnitude | (0xffu << 23);
    // A subnormal m * 2^-24 is converted exactly: 2^-14 + m * 2^-24 has m as its mantissa; then 2^-14 is subtracted.
    const Words two_to_minus_14 = Words{} + (113u << 23);
    const Words subnormal = (Words)((Floats)(magnitude + two_to_minus_14) - (Floats)two_to_minus_14);
    const Words finite = magnitude < (1u << 23) ? subnormal : normal;
    const Words value = magnitude >= (0x1fu << 23) ? infinite_or_nan : finite;
    return (Floats)(value | ((half & 0x8000) << 16));
  }

  SYNCENGINE_INLINE static Words float32_to_float16(Floats x) {
    const Words sign = (Words)x & 0x80000000;
    const Words magnitude = (Words)x ^ sign;
    // Ties go to even. A carry out of the mantissa raises the exponent, up to infinity, as it should.
    const Words normal = (magnitude - ((127u - 15u) << 23) + 0xfff + ((magnitude >> 13) & 1)) >> 13;
    // Adding 0.5 shifts a value below 2^-14 to where float32's own rounding cuts at 2^-24, float16's last place.
    const Words one_half = Words{} + (126u << 23);
    const Words subnormal = (Words)((Floats)magnitude + (Floats)one_half) - one_half;
    const Words infinite_or_nan = magnitude > (0xffu << 23) ? Words{} + 0x7e00 : Words{} + 0x7c00;
    const Words finite = magnitude < (113u << 23) ? subnormal : normal;
    const Words value = magnitude >= (143u << 23) ? infinite_or_nan : finite;
    return value | (sign >> 16);
  }
};

}  // namespace

}  // namespace syncengine::kernels
