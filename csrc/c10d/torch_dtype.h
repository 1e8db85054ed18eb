// torch's dtypes and reductions in the engine's words.
#pragma once

#include <ATen/core/Tensor.h>

#include <torch/csrc/distributed/c10d/Types.hpp>

#include "base/dtype.h"

namespace syncengine {

// What is only moved: any dtype, as one whose bytes are as many, or as bytes.
DType moved_as(c10::ScalarType type);

struct TorchReduction {
  DType dtype;
  ReduceOp op;
  double postscale = 1.0;
};

// Throws InvalidUsage, naming `call`, where the operator has no meaning for the dtype. PREMUL_SUM is a sum of what
// premultiplied() gives. Logical: the sum of bools is their "or".
TorchReduction reduction_of(const ::c10d::ReduceOp& op, c10::ScalarType type, int world, const char* call);

// Whether `op` combines bits (BAND, BOR, BXOR), which the engine doesn't. Throws InvalidUsage where `type` has none.
bool is_bitwise(const ::c10d::ReduceOp& op, c10::ScalarType type, const char* call);

// What all of `parts`, which lie one after the other along the first dimension, make.
at::Tensor combined_bits(const ::c10d::ReduceOp& op, const at::Tensor& parts);

// `tensor` times the factor of PREMUL_SUM, as a new contiguous tensor; undefined for other operators.
at::Tensor premultiplied(const ::c10d::ReduceOp& op, const at::Tensor& tensor);

}  // namespace syncengine
