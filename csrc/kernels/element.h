// The arithmetic of one element, for host and device: the formats of body.h, written once more for a processor without
// vectors, and the operators, which body.h applies to vectors, too. The core's tests compare the two headers' results
// bit for bit.
//
// Functions are always inlined, since files that are compiled for different instruction sets include this one (half.h).
//
// No product ever feeds an addition here, so no compiler can fuse the two, whatever its flags.
#pragma once

#include <cstdint>
#include <cstring>
#include <type_traits>

#ifdef __CUDACC__
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#define SYNCENGINE_BOTH __host__ __device__ __forceinline__
#define SYNCENGINE_UNROLL _Pragma("unroll")
#else
#define SYNCENGINE_BOTH [[gnu::always_inline]] inline
#define SYNCENGINE_UNROLL
#endif

namespace syncengine::kernels {

template <class To, class From>
SYNCENGINE_BOTH To bits_as(From from) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  memcpy(&to, &from, sizeof(to));
  return to;
}

// A format: how an element lies in memory (Stored), the type in which it is reduced (Value), and how one becomes the
// other.

template <class T>
struct PlainElement {
  using Stored = T;
  using Value = T;
  using Scale = T;
  static constexpr bool kFloating = std::is_floating_point_v<T>;
  SYNCENGINE_BOTH static Value widen(Stored x) { return x; }
  SYNCENGINE_BOTH static Stored narrow(Value x) { return x; }
};

struct HalfElement {
  using Stored = uint16_t;
  using Value = float;
  using Scale = float;
  static constexpr bool kFloating = true;
};

struct BFloat16Element : HalfElement {
  SYNCENGINE_BOTH static float widen(uint16_t x) { return bits_as<float>(static_cast<uint32_t>(x) << 16); }
  SYNCENGINE_BOTH static uint16_t narrow(float x) {
#ifdef __CUDA_ARCH__
    return __bfloat16_as_ushort(__float2bfloat16_rn(x));
#else
    const uint32_t bits = bits_as<uint32_t>(x);
    const uint32_t rounded = bits + 0x7fff + ((bits >> 16) & 1);
    return static_cast<uint16_t>((x != x ? bits | 0x00400000 : rounded) >> 16);
#endif
  }
};

// Conversions by the steps that half.h explains; devices have instructions with the same results.
struct Float16Element : HalfElement {
  SYNCENGINE_BOTH static float widen(uint16_t half) {
#ifdef __CUDA_ARCH__
    return __half2float(__ushort_as_half(half));
#else
    const uint32_t magnitude = (half & 0x7fffu) << 13;
    const uint32_t normal = magnitude + ((127u - 15u) << 23);
    const uint32_t infinite_or_nan = magnitude | (0xffu << 23);
    const uint32_t two_to_minus_14 = 113u << 23;
    const uint32_t subnormal =
        bits_as<uint32_t>(bits_as<float>(magnitude + two_to_minus_14) - bits_as<float>(two_to_minus_14));
    const uint32_t finite = magnitude < (1u << 23) ? subnormal : normal;
    const uint32_t value = magnitude >= (0x1fu << 23) ? infinite_or_nan : finite;
    return bits_as<float>(value | ((half & 0x8000u) << 16));
#endif
  }
  SYNCENGINE_BOTH static uint16_t narrow(float x) {
#ifdef __CUDA_ARCH__
    return __half_as_ushort(__float2half_rn(x));
#else
    const uint32_t bits = bits_as<uint32_t>(x), sign = bits & 0x80000000u, magnitude = bits ^ sign;
    const uint32_t normal = (magnitude - ((127u - 15u) << 23) + 0xfff + ((magnitude >> 13) & 1)) >> 13;
    const uint32_t one_half = 126u << 23;
    const uint32_t subnormal = bits_as<uint32_t>(bits_as<float>(magnitude) + bits_as<float>(one_half)) - one_half;
    const uint32_t infinite_or_nan = magnitude > (0xffu << 23) ? 0x7e00u : 0x7c00u;
    const uint32_t finite = magnitude < (113u << 23) ? subnormal : normal;
    const uint32_t value = magnitude >= (143u << 23) ? infinite_or_nan : finite;
    return static_cast<uint16_t>(value | (sign >> 16));
#endif
  }
};

// The type in which sums and products are made. Integers take an unsigned one of at least 32 bits: its overflow is
// defined, and C++ does not promote it to int.
template <class V>
using Wrapping = std::conditional_t<!std::is_integral_v<V>, V, std::conditional_t<(sizeof(V) > 4), uint64_t, uint32_t>>;

// Classifies a floating-point value: 0 NaN, 1 and 2 the infinities, 3 a finite number.
template <class V>
SYNCENGINE_BOTH uint32_t flaw_of(V value) {
  if (value != value) return 0;
  if (value - value == V{}) return 3;
  return value > V{} ? 1 : 2;
}

struct SumElement {
  template <class V>
  SYNCENGINE_BOTH static V apply(V a, V b) {
    return static_cast<V>(static_cast<Wrapping<V>>(a) + static_cast<Wrapping<V>>(b));
  }
};
struct ProductElement {
  template <class V>
  SYNCENGINE_BOTH static V apply(V a, V b) {
    return static_cast<V>(static_cast<Wrapping<V>>(a) * static_cast<Wrapping<V>>(b));
  }
};
// A NaN on either side wins; of equal values (0.0 and -0.0) the earlier one stays.
struct MinElement {
  template <class V>
  SYNCENGINE_BOTH static V apply(V a, V b) {
    return ((b < a) | (b != b)) ? b : a;
  }
};
struct MaxElement {
  template <class V>
  SYNCENGINE_BOTH static V apply(V a, V b) {
    return ((b > a) | (b != b)) ? b : a;
  }
};

}  // namespace syncengine::kernels
