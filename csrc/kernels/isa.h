// Internal to kernels/: what each instruction-set file offers to dispatch.cpp.
#pragma once

#include "kernels/reduce.h"

namespace syncengine::kernels {

using ReduceFunction = size_t (*)(const Reduction& reduction, const void* const* sources, int source_count,
                                  void* const* destinations, int destination_count, size_t count);

// Null where this build does not have it. Constants, so that merely asking runs no code of that instruction set.
extern const ReduceFunction kReduceScalar;
extern const ReduceFunction kReduceAvx2;
extern const ReduceFunction kReduceAvx512;
extern const ReduceFunction kReduceNeon;
extern const ReduceFunction kReduceNeonBf16;

}  // namespace syncengine::kernels
