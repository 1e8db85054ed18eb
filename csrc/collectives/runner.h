// Runs the steps of a chunk plan on memory: the one loop over spans, summation orders and kernels.
//
// Ownership: none. Thread-safety: one thread per Runner. Aliasing: as in Operation. Failure: none.
#pragma once

#include <cstddef>
#include <functional>
#include <vector>

#include "collectives/order.h"
#include "collectives/plan.h"

namespace syncengine {

class Runner {
 public:
  Runner(int rank, int world) : rank_(rank), world_(world), bases_(world), sources_(world), destinations_(world) {}

  // What a plan's `slot` offsets count in, for each rank: its staging slot, or its spans. All ranks' spans are of the
  // same lengths, so what is contiguous in one is contiguous in all.
  struct Base {
    std::byte* slot = nullptr;
    const SpanList* spans = nullptr;
    std::byte* at(size_t offset) const { return spans ? spans->at(offset) : slot + offset; }
  };
  std::vector<Base>& bases() { return bases_; }

  void stage(const Operation& operation, const ChunkPlan& plan);
  // `stop` is asked between pieces of at most 256 KiB; true leaves the rest undone and returns false.
  bool reduce(const Operation& operation, const ChunkPlan& plan, const std::function<bool()>& stop);
  bool pull(const Operation& operation, const ChunkPlan& plan, const std::function<bool()>& stop);

 private:
  void reduce_piece(const Operation& operation, const Reduce& step, size_t offset, std::byte* own, std::byte* out,
                    size_t bytes, const std::vector<int>& order);

  int rank_, world_;
  std::vector<Base> bases_;
  std::vector<const void*> sources_;
  std::vector<void*> destinations_;
  std::vector<int> order_;
};

}  // namespace syncengine
