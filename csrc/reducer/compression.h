// Buckets that travel in a smaller dtype: each contribution divided by the number of ranks in that dtype, as torch's
// compressing hooks do, reduced by the engine, and cast back.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <string>
#include <vector>

#include "base/dtype.h"
#include "reducer/gradient.h"

namespace syncengine {

class Compression {
 public:
  // Float16 or BFloat16; throws Error(InvalidUsage) for another.
  explicit Compression(c10::ScalarType type);

  DType dtype() const { return dtype_; }
  // Throws Error(InvalidUsage), naming it, for a parameter whose gradient can't be compressed.
  void check(const at::Tensor& parameter, const std::string& name) const;
  // A copy of one gradient's memory, element by element in the same order.
  at::Tensor compress(const at::Tensor& memory, Statistics& statistics) const;

 private:
  c10::ScalarType type_;
  DType dtype_;
};

}  // namespace syncengine
