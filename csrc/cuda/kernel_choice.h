// Which instance of the kernel reduces a dtype by an op: one table for the device and for the tests that run the
// bodies.
#pragma once

#include "base/dtype.h"
#include "cuda/body.h"

namespace syncengine::cuda {

template <class E, class O, kernels::Rounding kR, int kS>
struct ReduceInstance {
  using Element = E;
  using Op = O;
  static constexpr kernels::Rounding kRounding = kR;
  static constexpr int kSources = kS;
};

namespace choice {

using kernels::Rounding;

// Sums of floating dtypes are what training does: they have all their loads unrolled for the usual numbers of ranks.
template <class E, Rounding kR, class Visit>
void visit_sum(int sources, Visit&& visit) {
  if constexpr (E::kFloating && kR == Rounding::Once) {
    if (sources == 2) return visit(ReduceInstance<E, kernels::SumElement, kR, 2>{});
    if (sources == 4) return visit(ReduceInstance<E, kernels::SumElement, kR, 4>{});
    if (sources == 8) return visit(ReduceInstance<E, kernels::SumElement, kR, 8>{});
  }
  visit(ReduceInstance<E, kernels::SumElement, kR, 0>{});
}

template <class E, Rounding kR, class Visit>
void visit_arithmetic(ReduceOp op, int sources, Visit&& visit) {
  if (op == ReduceOp::Product) return visit(ReduceInstance<E, kernels::ProductElement, kR, 0>{});
  visit_sum<E, kR>(sources, visit);
}

template <class E, class Visit>
void visit_comparison(ReduceOp op, Visit&& visit) {
  if (op == ReduceOp::Min) return visit(ReduceInstance<E, kernels::MinElement, Rounding::Once, 0>{});
  visit(ReduceInstance<E, kernels::MaxElement, Rounding::Once, 0>{});
}

constexpr bool compares(ReduceOp op) { return op == ReduceOp::Min || op == ReduceOp::Max; }

template <class E, class Visit>
void visit_floating(ReduceOp op, Rounding rounding, int sources, Visit&& visit) {
  if (compares(op)) return visit_comparison<E>(op, visit);
  if constexpr (sizeof(typename E::Stored) == 2) {  // wider types are rounded at each addition either way
    if (rounding == Rounding::EveryHop) return visit_arithmetic<E, Rounding::EveryHop>(op, sources, visit);
  }
  visit_arithmetic<E, Rounding::Once>(op, sources, visit);
}

// Sums and products of signed integers are those of unsigned ones, which may overflow.
template <class T, class Visit>
void visit_integer(ReduceOp op, int sources, Visit&& visit) {
  if (compares(op)) return visit_comparison<kernels::PlainElement<T>>(op, visit);
  visit_arithmetic<kernels::PlainElement<std::make_unsigned_t<T>>, Rounding::Once>(op, sources, visit);
}

}  // namespace choice

// Calls visit(ReduceInstance<...>{}) once. The op must be supported for the dtype.
template <class Visit>
void visit_instance(DType dtype, ReduceOp op, kernels::Rounding rounding, int sources, Visit&& visit) {
  using namespace choice;
  switch (dtype) {
    case DType::Float16: return visit_floating<kernels::Float16Element>(op, rounding, sources, visit);
    case DType::BFloat16: return visit_floating<kernels::BFloat16Element>(op, rounding, sources, visit);
    case DType::Float32: return visit_floating<kernels::PlainElement<float>>(op, rounding, sources, visit);
    case DType::Float64: return visit_floating<kernels::PlainElement<double>>(op, rounding, sources, visit);
    case DType::Int8: return visit_integer<int8_t>(op, sources, visit);
    case DType::Int16: return visit_integer<int16_t>(op, sources, visit);
    case DType::Int32: return visit_integer<int32_t>(op, sources, visit);
    case DType::Int64: return visit_integer<int64_t>(op, sources, visit);
    case DType::UInt8:
    case DType::Bool: return visit_integer<uint8_t>(op, sources, visit);
  }
}

}  // namespace syncengine::cuda
