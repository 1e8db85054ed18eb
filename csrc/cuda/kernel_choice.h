// Chooses the instance of the kernel that reduces a dtype by an op: one table for the device and for the tests that run
// the bodies.
#pragma once

#include "base/dtype.h"
#include "cuda/body.h"

namespace syncengine::cuda {

// Sums of floating dtypes are what training does, so they have all their loads unrolled for the usual numbers of ranks.
template <class E, kernels::Rounding kR, class Visit>
void visit_arithmetic(ReduceOp op, int sources, Visit&& visit) {
  if (op == ReduceOp::Product) return visit.template operator()<E, kernels::ProductElement, kR, 0>();
  if constexpr (E::kFloating && kR == kernels::Rounding::Once) {
    if (sources == 2) return visit.template operator()<E, kernels::SumElement, kR, 2>();
    if (sources == 4) return visit.template operator()<E, kernels::SumElement, kR, 4>();
    if (sources == 8) return visit.template operator()<E, kernels::SumElement, kR, 8>();
  }
  visit.template operator()<E, kernels::SumElement, kR, 0>();
}

// Calls visit<Element, Op, kRounding, kSources>() once. The op must be supported for the dtype.
template <class E, class Visit>
void visit_element(ReduceOp op, kernels::Rounding rounding, int sources, Visit&& visit) {
  using kernels::Rounding;
  if (op == ReduceOp::Min) return visit.template operator()<E, kernels::MinElement, Rounding::Once, 0>();
  if (op == ReduceOp::Max) return visit.template operator()<E, kernels::MaxElement, Rounding::Once, 0>();
  // Wider dtypes are rounded at each addition in either mode.
  if constexpr (E::kFloating && sizeof(typename E::Stored) == 2)
    if (rounding == Rounding::EveryHop) return visit_arithmetic<E, Rounding::EveryHop>(op, sources, visit);
  visit_arithmetic<E, Rounding::Once>(op, sources, visit);
}

// Calls visit(Element{}) once.
template <class Visit>
void visit_dtype(DType dtype, Visit&& visit) {
  switch (dtype) {
    case DType::Float16: return visit(kernels::Float16Element{});
    case DType::BFloat16: return visit(kernels::BFloat16Element{});
    case DType::Float32: return visit(kernels::PlainElement<float>{});
    case DType::Float64: return visit(kernels::PlainElement<double>{});
    case DType::Int8: return visit(kernels::PlainElement<int8_t>{});
    case DType::Int16: return visit(kernels::PlainElement<int16_t>{});
    case DType::Int32: return visit(kernels::PlainElement<int32_t>{});
    case DType::Int64: return visit(kernels::PlainElement<int64_t>{});
    case DType::UInt8:
    case DType::Bool: return visit(kernels::PlainElement<uint8_t>{});
  }
}

}  // namespace syncengine::cuda
