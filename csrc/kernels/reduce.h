// Element-wise reduction and scaled copy: pure functions on memory. No ranks, no threads, no allocation.
//
// Ownership: none; the caller owns all memory. Thread-safety: reentrant.
// Failure: InvalidUsage for a wrong SYNCENGINE_ISA (call active_isa() early); arguments are checked by the caller.
// Aliasing: a destination may be exactly equal to a source (same address, same length); any other overlap is undefined.
// Pointers need only the alignment of their element.
//
// Bits: every instruction set gives the same bits, whatever the calling thread's rounding and flush-to-zero state
// (subnormals, infinities and signed zeros included; a NaN stays a NaN, its payload is free).
#pragma once

#include <cstddef>
#include <cstdint>

#include "base/dtype.h"

namespace syncengine::kernels {

// The place where a float16 or bfloat16 sum is rounded. Wider types are rounded at each addition in either mode.
enum class Rounding {
  Once,      // accumulate in float32, scale in float32, round at the end
  EveryHop,  // round after each addition, as a ring does that sends partial sums; and once more after scaling
};

struct Reduction {
  DType dtype;
  ReduceOp op;  // Avg adds like Sum; the caller sets `scale`
  Rounding rounding = Rounding::Once;
  double scale = 1.0;  // factor on the result, in float32 (float64: in float64); floating dtypes only
  // For sums of floating dtypes only: stops before the first block (at most kBlockBytes) with a NaN or infinite result.
  bool stops_at_nonfinite = false;
  // For floating sums with EveryHop: the sources are added on a stack. `merges` says for each source how many times the
  // two sums at the top become one after it has been pushed; in the end one is left. After the merges of a source, at
  // most kMaxTreeDepth sums lie below the top one. Null: sources are added one after the other.
  const uint8_t* merges = nullptr;
};

inline constexpr size_t kBlockBytes = 512;  // no block of results is larger
inline constexpr int kMaxTreeDepth = 8;

enum class Isa { Scalar, Avx2, Avx512, Neon, NeonBf16 };
const char* name(Isa isa);
Isa best_isa();              // what this processor runs
bool is_available(Isa isa);  // compiled in and runnable here
Isa active_isa();            // choose_isa(SYNCENGINE_ISA), read once
// The instruction set named "scalar", "avx2", "avx512", "neon" or "neon-bf16", or the best one if `wanted` is null or
// empty. Throws InvalidUsage if this build or processor does not have it.
Isa choose_isa(const char* wanted);

// Computes destination[j][i] = scale * (((source[0][i] op source[1][i]) op source[2][i]) ...), for 0 <= i < count and
// every j.
//
// There is at least one source; with one alone this is a scaled copy. Integers wrap around. Bools, which must be 0 or
// 1, know product (and), min (and), max (or). Min and max propagate NaN; of 0.0 and -0.0 they keep the earlier.
//
// Returns how many elements are done: all, unless stops_at_nonfinite; nothing was written beyond them. Only tests give
// `isa`, which must be available.
size_t reduce(const Reduction& reduction, const void* const* sources, int source_count, void* const* destinations,
              int destination_count, size_t count, Isa isa = active_isa());

// Computes destination[i] = scale * source[i], rounded once in dtype; a plain copy if scale == 1.0.
void copy_scaled(DType dtype, void* destination, const void* source, size_t count, double scale,
                 Isa isa = active_isa());

// float16 and bfloat16 to and from arrays of float32: for sums that leave a kernel before they are complete.
//
// Ownership: none. Thread-safety: reentrant. Aliasing: none allowed. Failure: none. Bits: exactly those of reduce(),
// whatever the calling thread's rounding and flush-to-zero state.

constexpr bool is_half(DType dtype) { return dtype == DType::Float16 || dtype == DType::BFloat16; }

// Both need a 16-bit `dtype`: see is_half().
void widen(DType dtype, float* destination, const void* source, size_t count);
void narrow(DType dtype, void* destination, const float* source, size_t count);

}  // namespace syncengine::kernels
