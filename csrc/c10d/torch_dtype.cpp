#include "c10d/torch_dtype.h"

#include <ATen/core/Tensor.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>

#include <optional>
#include <string>

#include "base/error.h"
#include "c10d/call.h"

namespace syncengine {

std::optional<DType> same_dtype(c10::ScalarType type) {
  switch (type) {
    case c10::ScalarType::Half: return DType::Float16;
    case c10::ScalarType::BFloat16: return DType::BFloat16;
    case c10::ScalarType::Float: return DType::Float32;
    case c10::ScalarType::Double: return DType::Float64;
    case c10::ScalarType::Char: return DType::Int8;
    case c10::ScalarType::Short: return DType::Int16;
    case c10::ScalarType::Int: return DType::Int32;
    case c10::ScalarType::Long: return DType::Int64;
    case c10::ScalarType::Byte: return DType::UInt8;
    case c10::ScalarType::Bool: return DType::Bool;
    default: return std::nullopt;
  }
}

namespace {

// The dtype of a number, or of the two parts of a complex one.
std::optional<DType> parts_of(c10::ScalarType type) { return same_dtype(c10::toRealValueType(type)); }

std::optional<ReduceOp> engine_op(::c10d::ReduceOp::RedOpType op) {
  switch (op) {
    case ::c10d::ReduceOp::SUM:
    case ::c10d::ReduceOp::PREMUL_SUM: return ReduceOp::Sum;
    case ::c10d::ReduceOp::AVG: return ReduceOp::Avg;
    case ::c10d::ReduceOp::PRODUCT: return ReduceOp::Product;
    case ::c10d::ReduceOp::MIN: return ReduceOp::Min;
    case ::c10d::ReduceOp::MAX: return ReduceOp::Max;
    default: return std::nullopt;
  }
}

const char* name(::c10d::ReduceOp::RedOpType op) {
  constexpr const char* kNames[] = {"SUM", "AVG", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR", "PREMUL_SUM"};
  return op < std::size(kNames) ? kNames[op] : "UNUSED";
}

[[noreturn]] void refuse_reduction(const ::c10d::ReduceOp& op, c10::ScalarType type, const char* call) {
  refuse(call, "ReduceOp.", name(op), " has no meaning for dtype ", c10::toString(type),
         " in syncengine: convert the tensor, or take another operator");
}

bool averages_integers(const ::c10d::ReduceOp& op, c10::ScalarType type) {
  return op == ::c10d::ReduceOp::AVG && c10::isIntegralType(type, /*includeBool=*/false) && same_dtype(type);
}

// Returns the dtype in which to reduce, on copies if that is not `type`. Int64 holds any sum of shorter integers.
c10::ScalarType reduced_as(const ::c10d::ReduceOp& op, c10::ScalarType type) {
  if (c10::isFloat8Type(type)) return c10::kFloat;
  return averages_integers(op, type) ? c10::kLong : type;
}

at::Tensor premultiplied(const ::c10d::ReduceOp& op, const at::Tensor& tensor) {
  // Torch 2.13 names this class PreMulSumSupplement, and keeps the old name as an alias.
  const auto* supplement = dynamic_cast<const ::c10d::NCCLPreMulSumSupplement*>(op.supplement_.get());
  if (supplement == nullptr) throw Error(ErrorKind::InvalidUsage, "ReduceOp.PREMUL_SUM without a factor");
  const at::Tensor& factor = supplement->tensor_factor;
  at::Tensor scaled = factor.defined() ? tensor.mul(factor.to(tensor.scalar_type()))
                                       : tensor.mul(at::Scalar(supplement->double_factor));
  return scaled.contiguous();
}

}  // namespace

DType moved_as(c10::ScalarType type) { return parts_of(type).value_or(DType::UInt8); }

Operation reduction_of(const ::c10d::ReduceOp& torch_op, c10::ScalarType given, int world, const char* call) {
  auto op = engine_op(torch_op);
  const c10::ScalarType type = reduced_as(torch_op, given);
  auto dtype = op == ReduceOp::Sum || op == ReduceOp::Avg ? parts_of(type) : same_dtype(type);
  if (op && dtype == DType::Bool && *op == ReduceOp::Sum) op = ReduceOp::Max;
  if (averages_integers(torch_op, given)) op = ReduceOp::Sum;
  bool scales = torch_op == ::c10d::ReduceOp::PREMUL_SUM;
  if (!op || !dtype || !is_supported(*dtype, *op) || (scales && (type != given || !is_floating(*dtype))))
    refuse_reduction(torch_op, given, call);
  return {.dtype = *dtype, .op = *op, .postscale = *op == ReduceOp::Avg ? 1.0 / world : 1.0};
}

bool is_bitwise(const ::c10d::ReduceOp& op, c10::ScalarType type, const char* call) {
  ::c10d::ReduceOp::RedOpType kind = op;
  if (kind != ::c10d::ReduceOp::BAND && kind != ::c10d::ReduceOp::BOR && kind != ::c10d::ReduceOp::BXOR) return false;
  if (!c10::isIntegralType(type, /*includeBool=*/true)) refuse_reduction(op, type, call);
  return true;
}

at::Tensor combined_bits(const ::c10d::ReduceOp& op, const at::Tensor& parts) {
  ::c10d::ReduceOp::RedOpType kind = op;
  at::Tensor result = parts[0];
  for (int64_t i = 1; i < parts.size(0); ++i) {
    result = kind == ::c10d::ReduceOp::BAND  ? result.bitwise_and(parts[i])
             : kind == ::c10d::ReduceOp::BOR ? result.bitwise_or(parts[i])
                                             : result.bitwise_xor(parts[i]);
  }
  return result;
}

at::Tensor prepared(Call& call, const ::c10d::ReduceOp& op, const at::Tensor& tensor) {
  at::NoGradGuard no_grad;
  const c10::ScalarType type = tensor.scalar_type(), as = reduced_as(op, type);
  if (as != type) return call.settled(tensor).to(as).contiguous();
  if (averages_integers(op, type)) return call.settled(tensor).clone(at::MemoryFormat::Contiguous);
  return op == ::c10d::ReduceOp::PREMUL_SUM ? premultiplied(op, call.settled(tensor)) : at::Tensor();
}

at::Tensor room_for(const ::c10d::ReduceOp& op, const at::Tensor& output) {
  const c10::ScalarType type = output.scalar_type(), as = reduced_as(op, type);
  if (as == type && !averages_integers(op, type)) return {};
  return at::empty(output.sizes(), output.options().dtype(as).memory_format(at::MemoryFormat::Contiguous));
}

void conclude(Call& call, const ::c10d::ReduceOp& op, const at::Tensor& target, const at::Tensor& result, int world) {
  if (averages_integers(op, target.scalar_type()))
    call.afterwards(target, [result, world] { result.div_(world, "trunc"); });
}

}  // namespace syncengine
