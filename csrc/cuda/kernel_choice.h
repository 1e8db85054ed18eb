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

// Sums of floating dtypes are what training does: they have all their loads unrolled for the usual numbers of ranks.
template <class E, kernels::Rounding kR, class Visit>
void visit_arithmetic(ReduceOp op, int sources, Visit&& visit) {
  if (op == ReduceOp::Product) return visit(ReduceInstance<E, kernels::ProductElement, kR, 0>{});
  if constexpr (E::kFloating && kR == kernels::Rounding::Once) {
    if (sources == 2) return visit(ReduceInstance<E, kernels::SumElement, kR, 2>{});
    if (sources == 4) return visit(ReduceInstance<E, kernels::SumElement, kR, 4>{});
    if (sources == 8) return visit(ReduceInstance<E, kernels::SumElement, kR, 8>{});
  }
  visit(ReduceInstance<E, kernels::SumElement, kR, 0>{});
}

// `E`: for minimum and maximum. `Sums`: for sums and products; those of signed integers are those of unsigned ones,
// which may overflow.
template <class E, class Sums, class Visit>
void visit_element(ReduceOp op, kernels::Rounding rounding, int sources, Visit&& visit) {
  using kernels::Rounding;
  if (op == ReduceOp::Min) return visit(ReduceInstance<E, kernels::MinElement, Rounding::Once, 0>{});
  if (op == ReduceOp::Max) return visit(ReduceInstance<E, kernels::MaxElement, Rounding::Once, 0>{});
  if constexpr (E::kFloating &&
                sizeof(typename E::Stored) == 2) {  // wider ones are rounded at each addition either way
    if (rounding == Rounding::EveryHop) return visit_arithmetic<Sums, Rounding::EveryHop>(op, sources, visit);
  }
  visit_arithmetic<Sums, Rounding::Once>(op, sources, visit);
}

// Calls visit(ReduceInstance<...>{}) once. The op must be supported for the dtype.
template <class Visit>
void visit_instance(DType dtype, ReduceOp op, kernels::Rounding rounding, int sources, Visit&& visit) {
  auto floating = [&]<class E>(E) { visit_element<E, E>(op, rounding, sources, visit); };
  auto integer = [&]<class T>(T) {
    using Sums = kernels::PlainElement<std::make_unsigned_t<T>>;
    visit_element<kernels::PlainElement<T>, Sums>(op, rounding, sources, visit);
  };
  switch (dtype) {
    case DType::Float16: return floating(kernels::Float16Element{});
    case DType::BFloat16: return floating(kernels::BFloat16Element{});
    case DType::Float32: return floating(kernels::PlainElement<float>{});
    case DType::Float64: return floating(kernels::PlainElement<double>{});
    case DType::Int8: return integer(int8_t{});
    case DType::Int16: return integer(int16_t{});
    case DType::Int32: return integer(int32_t{});
    case DType::Int64: return integer(int64_t{});
    case DType::UInt8:
    case DType::Bool: return integer(uint8_t{});
  }
}

}  // namespace syncengine::cuda
