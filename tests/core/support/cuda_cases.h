// Collectives for ranks of a GPU group: their tensors, and what should become of these.
#pragma once

#include <cstring>
#include <random>
#include <vector>

#include "collectives/operation.h"
#include "collectives/order.h"
#include "collectives/plan.h"
#include "kernels/element.h"
#include "kernels_oracle.h"
#include "tree_oracle.h"

namespace syncengine::testing {

struct Case {
  Collective collective;
  Path path;
  Numerics numerics = Numerics::RankOrder;
  DType dtype = DType::Float32;
  size_t count = 0;  // elements of the smaller tensor
  double prescale = 1.0;
  bool one_kernel = false;
  uint32_t leaves = 0;  // with Numerics::Tree
};

// One rank's tensors of a case; the values depend on the round.
struct Tensors {
  Tensors(const Case& c, int rank, int world) : rank(rank) {
    const size_t bytes = c.count * element_size(c.dtype);
    input.resize((c.collective == Collective::ReduceScatter ? world : 1) * bytes);
    if (c.collective == Collective::ReduceScatter || c.collective == Collective::AllGather)
      output.resize((c.collective == Collective::AllGather ? world : 1) * bytes);
  }
  std::vector<std::byte>& result() { return output.empty() ? input : output; }
  void fill(DType dtype, int round) {
    std::mt19937 random(round * 64 + rank);
    for (size_t i = 0; i < input.size() / element_size(dtype); ++i) {
      const float value = static_cast<float>(static_cast<int>(random() % 2000) - 1000) / 7;
      if (dtype == DType::BFloat16) {
        const uint16_t stored = kernels::BFloat16Element::narrow(value);
        std::memcpy(input.data() + 2 * i, &stored, 2);
      } else {
        std::memcpy(input.data() + 4 * i, &value, 4);
      }
    }
  }
  int rank;
  std::vector<std::byte> input, output;
};

// `input` and `output`: where its tensors lie, on a device perhaps; the same where it works in place.
inline Operation operation_of(const Case& c, Tensors& tensors, std::byte* input, std::byte* output) {
  Operation operation;
  operation.collective = c.collective;
  operation.dtype = c.dtype;
  operation.numerics = c.numerics;
  operation.root = 1;
  operation.leaves = c.leaves;
  operation.prescale = c.prescale;
  // Two spans: what is contiguous is cut in the middle.
  auto spans = [&](std::byte* memory, size_t bytes) {
    SpanList list;
    const size_t cut = c.one_kernel ? bytes : bytes / 2 / 8 * 8;
    list.add(memory, cut);
    list.add(memory + cut, bytes - cut);
    return list;
  };
  if (c.collective == Collective::Barrier) return operation;
  operation.input = spans(input, tensors.input.size());
  operation.output = tensors.output.empty() ? operation.input : spans(output, tensors.output.size());
  return operation;
}
inline Operation operation_of(const Case& c, Tensors& tensors) {
  return operation_of(c, tensors, tensors.input.data(), tensors.output.data());
}

// What `rank` should have: with every rank's tensors as they were before.
inline std::vector<std::byte> expected(const Case& c, std::vector<Tensors>& before, int rank) {
  const int world = static_cast<int>(before.size());
  const size_t element = element_size(c.dtype), bytes = c.count * element;
  std::vector<std::byte> result = before[rank].result();
  if (c.collective == Collective::Broadcast) return before[1].input;
  if (c.collective == Collective::AllGather) {
    for (int peer = 0; peer < world; ++peer)
      std::copy(before[peer].input.begin(), before[peer].input.end(), result.begin() + peer * bytes);
    return result;
  }
  const size_t start = c.collective == Collective::ReduceScatter ? rank * bytes : 0;
  const RingCut cut = c.collective == Collective::ReduceScatter ? RingCut{bytes} : ring_cut(bytes, element, world);
  for (size_t at = 0; at < bytes; at += element) {
    std::vector<int> order;
    for (int peer = 0; peer < world; ++peer) order.push_back(peer);
    if (c.numerics == Numerics::Ring) ring_order(cut.chunk_of(start + at), world, order);
    std::vector<uint64_t> scaled(world);
    std::vector<const void*> sources;
    for (int peer : order) {
      kernels::copy_scaled(c.dtype, &scaled[peer], before[peer].input.data() + start + at, 1, c.prescale);
      sources.push_back(&scaled[peer]);
    }
    kernels::Reduction reduction{c.dtype, ReduceOp::Sum,
                                 c.numerics == Numerics::Ring ? kernels::Rounding::EveryHop : kernels::Rounding::Once};
    auto element_bytes = expected(reduction, sources, 1);
    if (c.numerics == Numerics::Tree) {
      std::vector<decltype(element_bytes)> parts;
      for (const void* source : sources) parts.push_back(expected(reduction, {source}, 1));
      element_bytes = sum_of_tree(c.leaves, parts, [&](const auto& left, const auto& right) {
        return expected(reduction, {left.data(), right.data()}, 1);
      });
    }
    std::memcpy(result.data() + at, element_bytes.data(), element);
  }
  return result;
}

}  // namespace syncengine::testing
