// Buckets that are cast to a smaller dtype, reduced by the engine, and cast back.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <string>
#include <vector>

#include "base/dtype.h"
#include "reducer/gradients/gradient.h"

namespace syncengine {

class Compression {
 public:
  enum class Divides {
    First,  // each contribution by the number of ranks, in that dtype, as torch's compressing hooks do
    Last,   // their sum, as all-reduces without a hook
  };
  // Float16 or BFloat16; throws Error(InvalidUsage) for another.
  Compression(c10::ScalarType type, Divides divides);

  c10::ScalarType type() const { return type_; }
  DType dtype() const { return dtype_; }
  Divides divides() const { return divides_; }
  // Throws Error(InvalidUsage), naming it, for a parameter whose gradient can't be compressed.
  void check(const at::Tensor& parameter, const std::string& name) const;
  // A copy of one gradient's memory, element by element in the same order.
  at::Tensor compress(const at::Tensor& memory, Statistics& statistics) const;

 private:
  c10::ScalarType type_;
  DType dtype_;
  Divides divides_;
};

}  // namespace syncengine
