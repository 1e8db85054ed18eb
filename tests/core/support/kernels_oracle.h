// A second, slow opinion on reductions: numbers as reals, rounded by definition. Shares no code with csrc/kernels.
#pragma once

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>
#include <vector>

#include "base/dtype.h"
#include "kernels/reduce.h"

namespace syncengine::testing {

inline constexpr DType kDTypes[] = {DType::Float16, DType::BFloat16, DType::Float32, DType::Float64, DType::Int8,
                                    DType::Int16,   DType::Int32,    DType::Int64,   DType::UInt8,   DType::Bool};
inline constexpr ReduceOp kOps[] = {ReduceOp::Sum, ReduceOp::Avg, ReduceOp::Product, ReduceOp::Min, ReduceOp::Max};
inline constexpr DType kFloatingDTypes[] = {DType::Float16, DType::BFloat16, DType::Float32, DType::Float64};

// A 16-bit binary floating-point format.
struct HalfFormat {
  int mantissa_bits;
  int max_exponent;  // of the largest finite value; the bias as well
  int min_exponent() const { return 1 - max_exponent; }
};
inline constexpr HalfFormat kFloat16{10, 15}, kBFloat16{7, 127};

inline double decode(HalfFormat format, uint16_t bits) {
  const int exponent = (bits & 0x7fff) >> format.mantissa_bits;
  const int mantissa = bits & ((1 << format.mantissa_bits) - 1);
  const double sign = bits & 0x8000 ? -1.0 : 1.0;
  if (exponent == 2 * format.max_exponent + 1) return sign * (mantissa ? NAN : INFINITY);
  const int last_place = (exponent ? exponent - format.max_exponent : format.min_exponent()) - format.mantissa_bits;
  return sign * std::ldexp(exponent ? mantissa + (1 << format.mantissa_bits) : mantissa, last_place);
}

// To the nearest, ties to even: counts in units of the last place.
inline uint16_t encode(HalfFormat format, double value) {
  const uint16_t sign = std::signbit(value) ? 0x8000 : 0;
  const uint16_t infinity = (2 * format.max_exponent + 1) << format.mantissa_bits;
  if (std::isnan(value)) return infinity | 1;
  if (std::isinf(value)) return sign | infinity;
  int exponent = value == 0 ? format.min_exponent() : std::max(std::ilogb(value), format.min_exponent());
  long units = std::lrint(std::ldexp(std::fabs(value), format.mantissa_bits - exponent));
  // Units of 1 << mantissa_bits and more count the implicit bit, which thereby adds one to the exponent's field.
  const long field = (exponent - format.min_exponent()) * (1L << format.mantissa_bits) + units;
  return sign | static_cast<uint16_t>(std::min<long>(field, infinity));
}

#ifdef __SIZEOF_FLOAT128__
using Quad = __float128;
#else
using Quad = long double;
#endif
static_assert(sizeof(Quad) == 16);

// The arithmetic of one dtype. In a wider type with more than twice the bits, so that rounding twice is rounding once.
template <class T, class Wide>
struct Arithmetic {
  static T add(T a, T b) { return static_cast<T>(static_cast<Wide>(a) + static_cast<Wide>(b)); }
  static T multiply(T a, T b) { return static_cast<T>(static_cast<Wide>(a) * static_cast<Wide>(b)); }
};

template <class Numbers, class T>
T combine(ReduceOp op, T a, T b) {
  if (op == ReduceOp::Sum || op == ReduceOp::Avg) return Numbers::add(a, b);
  if (op == ReduceOp::Product) return Numbers::multiply(a, b);
  if (a != a || b != b) return a != a ? a : b;
  if (a == b) return a;
  return (a < b) == (op == ReduceOp::Min) ? a : b;
}

template <class T>
T at(const void* array, size_t i) {
  T value;
  std::memcpy(&value, static_cast<const char*>(array) + i * sizeof(T), sizeof(T));
  return value;
}

// As the reduction has them: one after the other, or on its stack. `value(s)`: of source s; `add`: of two.
template <class Value, class Add>
auto fold(const kernels::Reduction& reduction, size_t sources, const Value& value, const Add& add) {
  using V = decltype(value(0));
  std::array<V, kernels::kMaxTreeDepth + 2> stack;  // on the heap it would take most of the oracle's time
  size_t depth = 0;
  for (size_t s = 0; s < sources; ++s) {
    stack.at(depth++) = value(s);
    for (int merges = reduction.merges ? reduction.merges[s] : s > 0; merges > 0; --merges) {
      --depth;
      stack.at(depth - 1) = add(stack.at(depth - 1), stack.at(depth));
    }
  }
  return stack.at(depth - 1);
}

template <class T, class Wide>
T expected_element(const kernels::Reduction& reduction, const std::vector<const void*>& sources, size_t i) {
  T result = fold(
      reduction, sources.size(), [&](size_t s) { return at<T>(sources[s], i); },
      [&](T a, T b) { return combine<Arithmetic<T, Wide>>(reduction.op, a, b); });
  if constexpr (std::is_floating_point_v<T>) {
    result = Arithmetic<T, Wide>::multiply(result, static_cast<T>(reduction.scale));
  }
  return result;
}

inline uint16_t expected_half(HalfFormat format, const kernels::Reduction& reduction,
                              const std::vector<const void*>& sources, size_t i) {
  using Numbers = Arithmetic<float, double>;
  const float result = fold(
      reduction, sources.size(),
      [&](size_t s) { return static_cast<float>(decode(format, at<uint16_t>(sources[s], i))); },
      [&](float a, float b) {
        const float sum = combine<Numbers>(reduction.op, a, b);
        if (reduction.rounding == kernels::Rounding::Once) return sum;
        return static_cast<float>(decode(format, encode(format, sum)));
      });
  return encode(format, Numbers::multiply(result, static_cast<float>(reduction.scale)));
}

// What reduce() should write to each destination.
inline std::vector<uint8_t> expected(const kernels::Reduction& reduction, const std::vector<const void*>& sources,
                                     size_t count) {
  const size_t size = element_size(reduction.dtype);
  std::vector<uint8_t> result(count * size);
  auto fill = [&](auto element) {
    for (size_t i = 0; i < count; ++i) {
      const auto value = element(i);
      std::memcpy(result.data() + i * size, &value, size);
    }
  };
  using Wide = __int128;  // of which the low bits are kept: wraps around
  switch (reduction.dtype) {
    case DType::Float16: fill([&](size_t i) { return expected_half(kFloat16, reduction, sources, i); }); break;
    case DType::BFloat16: fill([&](size_t i) { return expected_half(kBFloat16, reduction, sources, i); }); break;
    case DType::Float32: fill([&](size_t i) { return expected_element<float, double>(reduction, sources, i); }); break;
    case DType::Float64: fill([&](size_t i) { return expected_element<double, Quad>(reduction, sources, i); }); break;
    case DType::Int8: fill([&](size_t i) { return expected_element<int8_t, Wide>(reduction, sources, i); }); break;
    case DType::Int16: fill([&](size_t i) { return expected_element<int16_t, Wide>(reduction, sources, i); }); break;
    case DType::Int32: fill([&](size_t i) { return expected_element<int32_t, Wide>(reduction, sources, i); }); break;
    case DType::Int64: fill([&](size_t i) { return expected_element<int64_t, Wide>(reduction, sources, i); }); break;
    case DType::UInt8: fill([&](size_t i) { return expected_element<uint8_t, Wide>(reduction, sources, i); }); break;
    case DType::Bool: fill([&](size_t i) { return expected_element<bool, Wide>(reduction, sources, i); }); break;
  }
  return result;
}

inline bool is_nan(DType dtype, const void* array, size_t i) {
  switch (dtype) {
    case DType::Float16: return std::isnan(decode(kFloat16, at<uint16_t>(array, i)));
    case DType::BFloat16: return std::isnan(decode(kBFloat16, at<uint16_t>(array, i)));
    case DType::Float32: return std::isnan(at<float>(array, i));
    case DType::Float64: return std::isnan(at<double>(array, i));
    default: return false;
  }
}

// The first element whose bits differ (a NaN equals a NaN), or -1.
inline long first_difference(DType dtype, const void* a, const void* b, size_t count) {
  const size_t size = element_size(dtype);
  for (size_t i = 0; i < count; ++i) {
    const size_t at = i * size;
    const bool same = std::memcmp(static_cast<const char*>(a) + at, static_cast<const char*>(b) + at, size) == 0;
    if (!same && !(is_nan(dtype, a, i) && is_nan(dtype, b, i))) return static_cast<long>(i);
  }
  return -1;
}

}  // namespace syncengine::testing
