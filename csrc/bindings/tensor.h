// Tensors as the engine sees them: spans and element types.
#pragma once

#include <ATen/core/Tensor.h>

#include <string>

#include "base/dtype.h"
#include "collectives/operation.h"

namespace syncengine {

// Throws InvalidUsage, naming `what`, for a dtype that the engine does not know.
DType dtype_of(at::ScalarType type, const char* what);

// "sum", "avg", "product", "min", "max"; throws InvalidUsage for anything else.
ReduceOp op_of(const std::string& text);

// Dense, both on CPUs or both on one CUDA device. Throws InvalidUsage naming `what`.
void require_one_device(const at::Tensor& input, const at::Tensor& output, const char* what);

}  // namespace syncengine
