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

// A CPU tensor, not sparse. Throws InvalidUsage naming `what`.
void require_cpu(const at::Tensor& tensor, const char* what);

}  // namespace syncengine
