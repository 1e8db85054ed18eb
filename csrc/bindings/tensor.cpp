#include "bindings/tensor.h"

#include "base/error.h"
#include "reducer/torch/dense.h"

namespace syncengine {

DType dtype_of(at::ScalarType type, const char* what) {
  switch (type) {
    case at::kHalf: return DType::Float16;
    case at::kBFloat16: return DType::BFloat16;
    case at::kFloat: return DType::Float32;
    case at::kDouble: return DType::Float64;
    case at::kChar: return DType::Int8;
    case at::kShort: return DType::Int16;
    case at::kInt: return DType::Int32;
    case at::kLong: return DType::Int64;
    case at::kByte: return DType::UInt8;
    case at::kBool: return DType::Bool;
    default:
      throw Error(ErrorKind::InvalidUsage,
                  std::string(what) + ": dtype " + c10::toString(type) +
                      " is not supported; use float16, bfloat16, float32, float64, int8 to int64, "
                      "uint8 or bool");
  }
}

ReduceOp op_of(const std::string& text) {
  for (ReduceOp op : {ReduceOp::Sum, ReduceOp::Avg, ReduceOp::Product, ReduceOp::Min, ReduceOp::Max}) {
    if (text == name(op)) return op;
  }
  throw Error(ErrorKind::InvalidUsage, "op '" + text + "' is not one of 'sum', 'avg', 'product', 'min', 'max'");
}

void require_one_device(const at::Tensor& input, const at::Tensor& output, const char* what) {
  for (const at::Tensor& tensor : {input, output}) {
    std::string why = why_not_dense(tensor);
    if (why.empty() && !tensor.device().is_cpu() && !tensor.device().is_cuda()) why = "one on " + tensor.device().str();
    if (why.empty()) why = why_without_memory(tensor);
    if (!why.empty())
      throw Error(ErrorKind::InvalidUsage,
                  std::string(what) + ": needs a dense tensor on a CPU or CUDA device, not " + why);
  }
  if (input.device() != output.device())
    throw Error(ErrorKind::InvalidUsage, std::string(what) + ": input is on " + input.device().str() + ", output on " +
                                             output.device().str() + "; move one of them");
}

}  // namespace syncengine
