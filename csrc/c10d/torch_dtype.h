// torch's dtypes and reductions in the engine's words.
#pragma once

#include <ATen/core/Tensor.h>

#include <torch/csrc/distributed/c10d/Types.hpp>

#include <functional>
#include <optional>

#include "base/dtype.h"

namespace syncengine {

// The same as the engine knows it; nothing if it does not.
std::optional<DType> same_dtype(c10::ScalarType type);

// What is only moved: any dtype, as one whose bytes are as many, or as bytes.
DType moved_as(c10::ScalarType type);

struct TorchReduction {
  DType dtype;
  ReduceOp op;
  double postscale = 1.0;
};

// Throws InvalidUsage, naming `call`, where the operator has no meaning for the dtype. PREMUL_SUM is a sum of what
// prepared() gives. Logical: the sum of bools is their "or".
TorchReduction reduction_of(const ::c10d::ReduceOp& op, c10::ScalarType type, int world, const char* call);

// Whether `op` combines bits (BAND, BOR, BXOR), which the engine doesn't. Throws InvalidUsage where `type` has none.
bool is_bitwise(const ::c10d::ReduceOp& op, c10::ScalarType type, const char* call);

// What all of `parts`, which lie one after the other along the first dimension, make.
at::Tensor combined_bits(const ::c10d::ReduceOp& op, const at::Tensor& parts);

// What the engine does not have for a dtype is reduced on copies, which prepared() makes: of another dtype (float8 in
// float32, averages of integers in int64), or with a factor (PREMUL_SUM). Undefined: the tensor itself will do.
at::Tensor prepared(const ::c10d::ReduceOp& op, const at::Tensor& tensor);
// Memory for the result of such copies.
at::Tensor room_for(const ::c10d::ReduceOp& op, const at::Tensor& output);
// What is still to be done to the result, which is such a copy; empty if nothing.
std::function<void()> conclusion(const ::c10d::ReduceOp& op, c10::ScalarType type, const at::Tensor& result, int world);

}  // namespace syncengine
