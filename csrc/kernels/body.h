// The reduction itself, once for all instruction sets. An instruction set is a class derived from HalfConversions, some
// of whose members it may replace, with these members, too:
//   load_partial, store_partial  as in half.h
//   any                          whether a vector of 32-bit words has a bit
//   any_nonfinite                whether a vector of floats has NaN or an infinity; it may be left out
//
// Everything here has internal linkage, and calls no function of the standard library, for the reason given in half.h.
//
// No product ever feeds an addition here, so no compiler can fuse the two, whatever its flags.
#pragma once

#ifdef __FAST_MATH__
#error "the kernels promise the same bits everywhere: build without -ffast-math"
#endif

#include <type_traits>

#include "kernels/element.h"
#include "kernels/half.h"
#include "kernels/isa.h"

namespace syncengine::kernels {
namespace {

template <class V>
SYNCENGINE_INLINE V larger(V a, V b) {
  return b > a ? b : a;
}

// Whether an element of `x` is NaN or infinite. x - x is zero for finite elements alone.
template <class Isa, class V>
SYNCENGINE_INLINE bool any_nonfinite(V x) {
  if constexpr (requires { Isa::any_nonfinite(x); })
    return Isa::any_nonfinite(x);
  else
    return Isa::any((Vector<uint32_t, Isa::kVectorBytes>)(x - x), ~0u);
}

// A format defines how elements lie in memory (Stored), the type in which they are reduced (Value), and the
// conversions. narrow_finite() returns whether all of a block's results are finite, and narrows them if so.

template <class Isa, class T>
struct Native {
  using Stored = Vector<T, Isa::kVectorBytes>;
  using Value = Stored;
  using Scale = T;
  static constexpr size_t kElementBytes = sizeof(T);
  static constexpr bool kFloating = std::is_floating_point_v<T>;
  SYNCENGINE_INLINE static Value widen(Stored x) { return x; }
  SYNCENGINE_INLINE static Stored narrow(Value x) { return x; }

  // The sum of all results is finite only if each of them is, so one look at the sum is enough; a sum of large results
  // may overflow, which only costs a second look. It is made as a tree, whose additions do not wait for each other.
  template <int kVectors>
  SYNCENGINE_INLINE static bool narrow_finite(const Value (&x)[kVectors], Stored (&narrowed)[kVectors]) {
    Value total[kVectors];
    for (int v = 0; v < kVectors; ++v) narrowed[v] = total[v] = x[v];
    for (int width = kVectors / 2; width > 0; width /= 2)
      for (int v = 0; v < width; ++v) total[v] += total[v + width];
    return !any_nonfinite<Isa>(total[0]);
  }
};

template <class Isa>
struct Half {
  using Stored = typename HalfConversions<Isa::kVectorBytes>::Words;
  using Value = typename HalfConversions<Isa::kVectorBytes>::Pair;
  using Scale = float;
  static constexpr size_t kElementBytes = 2;
  static constexpr bool kFloating = true;
};

template <class Isa>
struct BFloat16 : Half<Isa> {
  using typename Half<Isa>::Stored, typename Half<Isa>::Value;
  using Conversions = typename Isa::BFloat16Conversions;
  SYNCENGINE_INLINE static Value widen(Stored x) { return Conversions::from_bfloat16(x); }
  SYNCENGINE_INLINE static Stored narrow(Value x) { return Conversions::to_bfloat16(x); }

  // A float32 value becomes NaN or infinite as bfloat16 if its bits, without the sign, exceed a limit. So a look at the
  // greatest bits of a block is enough, and the conversion needs no check for NaN of its own.
  template <int kVectors>
  SYNCENGINE_INLINE static bool narrow_finite(const Value (&x)[kVectors], Stored (&narrowed)[kVectors]) {
    using Words = Vector<uint32_t, Isa::kVectorBytes>;
    Words most{};
    for (int v = 0; v < kVectors; ++v) {
      most = larger(most, (Words)x[v].low << 1);
      most = larger(most, (Words)x[v].high << 1);
      narrowed[v] = Conversions::finite_to_bfloat16(x[v]);
    }
    return !Isa::any(most >> 1 > Words{} + 0x7f7f7fff, ~0u);
  }
};

template <class Isa>
struct Float16 : Half<Isa> {
  using typename Half<Isa>::Stored, typename Half<Isa>::Value;
  SYNCENGINE_INLINE static Value widen(Stored x) { return Isa::from_float16(x); }
  SYNCENGINE_INLINE static Stored narrow(Value x) { return Isa::to_float16(x); }

  template <int kVectors>
  SYNCENGINE_INLINE static bool narrow_finite(const Value (&x)[kVectors], Stored (&narrowed)[kVectors]) {
    using Words = Vector<uint16_t, Isa::kVectorBytes>;
    Words most{};
    for (int v = 0; v < kVectors; ++v) {
      narrowed[v] = narrow(x[v]);
      most = larger(most, (Words)narrowed[v] & 0x7fff);
    }
    // Adding one to the exponent of a value that is not finite carries into the sign bit.
    return !Isa::any((Vector<uint32_t, Isa::kVectorBytes>)(most + (1 << 10)), 0x80008000);
  }
};

template <class Op, class V>
SYNCENGINE_INLINE V combine(V a, V b) {
  return Op::apply(a, b);
}
template <class Op, class V>
SYNCENGINE_INLINE Pair<V> combine(Pair<V> a, Pair<V> b) {
  return {Op::apply(a.low, b.low), Op::apply(a.high, b.high)};
}
template <class V>
SYNCENGINE_INLINE Pair<V> operator*(Pair<V> x, float scale) {
  return {x.low * scale, x.high * scale};
}

template <class Isa, class Format, class Op, Rounding kRounding, bool kStops = false, bool kTree = false>
struct Loop {
  using Stored = typename Format::Stored;
  using Value = typename Format::Value;
  static constexpr size_t kBytes = sizeof(Stored);
  // How many vectors of each source make a block. Its results fill four registers, two for each vector of 16-bit
  // elements: that makes the fetching of pointers cheap. With a check for NaN they fill eight for 16-bit elements,
  // whose check takes longer, and two for others with AVX-512, whose stores wait for the check.
  static constexpr bool kHalf = sizeof(Stored) != sizeof(Value);
  static constexpr int kUnroll = (!kStops                   ? 4
                                  : kHalf                   ? 8
                                  : Isa::kVectorBytes == 64 ? 2
                                                            : 4) *
                                 sizeof(Stored) / sizeof(Value);

  static_assert(kUnroll * kBytes <= kBlockBytes);

  // Returns the number of elements that are done.
  static size_t run(const Operands& operands) {
    if constexpr (std::is_same_v<Op, SumElement>) {
      if (operands.source_count == 2 && operands.destination_count == 2) return run_two(operands);
    }
    return run_any(operands);
  }

  // run_any() and run_two() are not inlined (fp_state.h). Operands by value stay in registers: no store changes them.
  [[gnu::noinline]] static size_t run_any(const Operands operands) { return run_blocks(operands); }

  // Two ranks in place are the commonest case, about a sixth faster in the cache with all four pointers in registers.
  [[gnu::noinline]] static size_t run_two(const Operands operands) {
    const void* const sources[] = {operands.sources[0], operands.sources[1]};
    void* const destinations[] = {operands.destinations[0], operands.destinations[1]};
    return run_blocks({sources, 2, destinations, 2, operands.count, operands.scale});
  }

  SYNCENGINE_INLINE static size_t run_blocks(const Operands& operands) {
    size_t offset = 0;
    const size_t end = operands.count * Format::kElementBytes;
    for (; end - offset >= kUnroll * kBytes; offset += kUnroll * kBytes)
      if (!block<kUnroll>(operands, offset)) return offset / Format::kElementBytes;
    for (; end - offset >= kBytes; offset += kBytes)
      if (!block<1>(operands, offset)) return offset / Format::kElementBytes;
    if (offset < end && !block<1, /*kPartial=*/true>(operands, offset, end - offset))
      return offset / Format::kElementBytes;
    return operands.count;
  }

  // Reads every source before it writes any destination, since they may be the same memory. Returns false if nothing
  // was written.
  template <int kVectors, bool kPartial = false>
  SYNCENGINE_INLINE static bool block(const Operands& operands, size_t offset, size_t bytes = kBytes) {
    Value result[kVectors];
    [[maybe_unused]] Value below[kTree ? kMaxTreeDepth : 1][kVectors];  // what waits for its other half
    [[maybe_unused]] int depth = 0;
    const std::byte* source = static_cast<const std::byte*>(operands.sources[0]) + offset;
    for (int v = 0; v < kVectors; ++v) result[v] = read<kPartial>(source + v * kBytes, bytes);
    for (int s = 1; s < operands.source_count; ++s) {
      source = static_cast<const std::byte*>(operands.sources[s]) + offset;
      if constexpr (kTree) {
        if (operands.merges[s] == 0) {
          for (int v = 0; v < kVectors; ++v) {
            below[depth][v] = result[v];
            result[v] = read<kPartial>(source + v * kBytes, bytes);
          }
          ++depth;
          continue;
        }
      }
      for (int v = 0; v < kVectors; ++v) add(result[v], read<kPartial>(source + v * kBytes, bytes));
      if constexpr (kTree) {
        for (int merge = 1; merge < operands.merges[s]; ++merge) {
          --depth;
          for (int v = 0; v < kVectors; ++v) add(result[v], below[depth][v]);
        }
      }
    }
    Stored stored[kVectors];
    if constexpr (Format::kFloating) {
      for (int v = 0; v < kVectors; ++v) result[v] = result[v] * static_cast<typename Format::Scale>(operands.scale);
    }
    if constexpr (kStops) {
      if (!Format::narrow_finite(result, stored)) return false;
    } else {
      for (int v = 0; v < kVectors; ++v) stored[v] = Format::narrow(result[v]);
    }
    for (int d = 0; d < operands.destination_count; ++d) {
      std::byte* destination = static_cast<std::byte*>(operands.destinations[d]) + offset;
      for (int v = 0; v < kVectors; ++v) write<kPartial>(destination + v * kBytes, stored[v], bytes);
    }
    return true;
  }

  SYNCENGINE_INLINE static void add(Value& sum, Value next) {
    sum = combine<Op>(sum, next);
    if constexpr (kRounding == Rounding::EveryHop) sum = Format::widen(Format::narrow(sum));
  }

  template <bool kPartial>
  SYNCENGINE_INLINE static Value read(const std::byte* source, size_t bytes) {
    if constexpr (kPartial) return Format::widen(Isa::template load_partial<Stored>(source, bytes));
    return Format::widen(load<Stored>(source));
  }

  template <bool kPartial>
  SYNCENGINE_INLINE static void write(std::byte* destination, Stored value, size_t bytes) {
    if constexpr (kPartial) return Isa::template store_partial<Stored>(destination, value, bytes);
    store(destination, value);
  }
};

template <class Isa, class Format, Rounding kRounding = Rounding::Once>
size_t run_arithmetic(ReduceOp op, const Operands& operands) {
  if (op == ReduceOp::Product) return Loop<Isa, Format, ProductElement, kRounding>::run(operands);
  if constexpr (Format::kFloating) {
    if (operands.merges && operands.source_count > 2) {  // of two there is one sum
      if (operands.stops)
        return Loop<Isa, Format, SumElement, kRounding, /*kStops=*/true, /*kTree=*/true>::run_any(operands);
      return Loop<Isa, Format, SumElement, kRounding, /*kStops=*/false, /*kTree=*/true>::run_any(operands);
    }
    if (operands.stops) return Loop<Isa, Format, SumElement, kRounding, /*kStops=*/true>::run(operands);
  }
  return Loop<Isa, Format, SumElement, kRounding>::run(operands);
}

// Min and max only pick one of their operands, so no rounding is needed. Sums and products of signed integers are
// computed as unsigned ones, whose overflow is defined: in the format Arithmetic.
template <class Isa, class Format, class Arithmetic = Format>
size_t run(ReduceOp op, Rounding rounding, const Operands& operands) {
  if (op == ReduceOp::Min) return Loop<Isa, Format, MinElement, Rounding::Once>::run(operands);
  if (op == ReduceOp::Max) return Loop<Isa, Format, MaxElement, Rounding::Once>::run(operands);
  if constexpr (std::is_base_of_v<Half<Isa>, Format>) {
    if (rounding == Rounding::EveryHop) return run_arithmetic<Isa, Format, Rounding::EveryHop>(op, operands);
  }
  return run_arithmetic<Isa, Arithmetic>(op, operands);
}

template <class Isa>
size_t reduce(const Reduction& reduction, const Operands& operands) {
  const ReduceOp op = reduction.op;
  const Rounding rounding = reduction.rounding;
  switch (reduction.dtype) {
    case DType::Float16: return run<Isa, Float16<Isa>>(op, rounding, operands);
    case DType::BFloat16: return run<Isa, BFloat16<Isa>>(op, rounding, operands);
    case DType::Float32: return run<Isa, Native<Isa, float>>(op, rounding, operands);
    case DType::Float64: return run<Isa, Native<Isa, double>>(op, rounding, operands);
    case DType::Int8: return run<Isa, Native<Isa, int8_t>, Native<Isa, uint8_t>>(op, rounding, operands);
    case DType::Int16: return run<Isa, Native<Isa, int16_t>, Native<Isa, uint16_t>>(op, rounding, operands);
    case DType::Int32: return run<Isa, Native<Isa, int32_t>, Native<Isa, uint32_t>>(op, rounding, operands);
    case DType::Int64: return run<Isa, Native<Isa, int64_t>, Native<Isa, uint64_t>>(op, rounding, operands);
    case DType::UInt8: return run<Isa, Native<Isa, uint8_t>>(op, rounding, operands);
    case DType::Bool:  // of zeros and ones "and" is the least and "or" the greatest
      return run<Isa, Native<Isa, uint8_t>>(op == ReduceOp::Max ? op : ReduceOp::Min, rounding, operands);
  }
  return operands.count;
}

}  // namespace
}  // namespace syncengine::kernels
