// Element types and reduction operators, without torch.
#pragma once

#include <cstddef>
#include <cstdint>

namespace syncengine {

enum class DType : uint8_t { Float16, BFloat16, Float32, Float64, Int8, Int16, Int32, Int64, UInt8, Bool };

enum class ReduceOp : uint8_t { Sum, Avg, Product, Min, Max };

constexpr size_t element_size(DType dtype) {
  switch (dtype) {
    case DType::Float16:
    case DType::BFloat16:
    case DType::Int16: return 2;
    case DType::Float32:
    case DType::Int32: return 4;
    case DType::Float64:
    case DType::Int64: return 8;
    case DType::Int8:
    case DType::UInt8:
    case DType::Bool: return 1;
  }
  return 0;
}

constexpr bool is_floating(DType dtype) { return dtype <= DType::Float64; }

const char* name(DType dtype);  // torch's spelling: "float32"
const char* name(ReduceOp op);  // "sum", "avg", "product", "min", "max"

// Whether the engine reduces `dtype` by `op`: Avg needs a floating dtype, and bool has only product, min and max.
constexpr bool is_supported(DType dtype, ReduceOp op) {
  if (op == ReduceOp::Avg) return is_floating(dtype);
  if (dtype == DType::Bool) return op != ReduceOp::Sum;
  return true;
}

}  // namespace syncengine
