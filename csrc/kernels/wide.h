// float16 and bfloat16 to and from arrays of float32: for sums that leave a kernel before they are complete.
//
// Ownership: none. Thread-safety: reentrant. Aliasing: none allowed. Failure: none. Bits: exactly those of reduce(),
// whatever the calling thread's rounding and flush-to-zero state.
#pragma once

#include <cstddef>

#include "base/dtype.h"

namespace syncengine::kernels {

constexpr bool is_half(DType dtype) { return dtype == DType::Float16 || dtype == DType::BFloat16; }

// `dtype` is one of the two.
void widen(DType dtype, float* destination, const void* source, size_t count);
void narrow(DType dtype, void* destination, const float* source, size_t count);

}  // namespace syncengine::kernels
