// Internal to kernels/: the functions that each instruction-set file offers to dispatch.cpp.
#pragma once

#include "kernels/reduce.h"

namespace syncengine::kernels {

// The memory that one call reduces, and the parts of its Reduction that the loops read.
struct Operands {
  const void* const* sources;
  int source_count;
  void* const* destinations;
  int destination_count;
  size_t count;
  double scale;
  bool stops = false;
  const uint8_t* merges = nullptr;
};

using ReduceFunction = size_t (*)(const Reduction& reduction, const Operands& operands);

// All but the scalar one exist only in builds for their kind of processor. These are constants, so that choosing one
// runs no code of its instruction set.
extern const ReduceFunction kReduceScalar;
extern const ReduceFunction kReduceAvx2;
extern const ReduceFunction kReduceAvx512;
extern const ReduceFunction kReduceNeon;
extern const ReduceFunction kReduceNeonBf16;

}  // namespace syncengine::kernels
