// Torch's dtypes and reductions, translated into the engine's.
#pragma once

#include <ATen/core/Tensor.h>

#include <torch/csrc/distributed/c10d/Types.hpp>

#include <optional>

#include "base/dtype.h"
#include "collectives/operation.h"

namespace syncengine {

class Call;

// The engine's dtype of the same kind; nothing if it has none.
std::optional<DType> same_dtype(c10::ScalarType type);

// Returns the dtype for an operation that only moves elements: theirs, or that of a complex number's parts, or UInt8.
DType moved_as(c10::ScalarType type);

// An operation with the dtype, operator and factor of a reduction. Throws InvalidUsage, naming `call`, if the operator
// has no meaning for the dtype. PREMUL_SUM is a sum of the copies that prepared() makes. A sum of bools is their
// logical "or".
Operation reduction_of(const ::c10d::ReduceOp& op, c10::ScalarType type, int world, const char* call);

// Whether `op` combines bits (BAND, BOR, BXOR), which the engine doesn't do. Throws InvalidUsage if `type` has no bits
// to combine.
bool is_bitwise(const ::c10d::ReduceOp& op, c10::ScalarType type, const char* call);

// Combines parts[0], parts[1], ... elementwise into one tensor, by the bitwise `op`: BAND, BOR or BXOR.
at::Tensor combined_bits(const ::c10d::ReduceOp& op, const at::Tensor& parts);

// A copy on which to reduce where the engine lacks the reduction for the dtype: of another dtype (float8 in float32,
// averages of integers in int64), or multiplied by a factor (PREMUL_SUM). Undefined if the tensor itself will do.
at::Tensor prepared(Call& call, const ::c10d::ReduceOp& op, const at::Tensor& tensor);
// Makes a tensor for the result of a reduce-scatter on copies of prepared(); undefined if `output` itself can take it.
at::Tensor room_for(const ::c10d::ReduceOp& op, const at::Tensor& output);
// If `op` averages integers, makes deliver() divide `result`, which is their sum, before that is put into `target`.
void conclude(Call& call, const ::c10d::ReduceOp& op, const at::Tensor& target, const at::Tensor& result, int world);

}  // namespace syncengine
