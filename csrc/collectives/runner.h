// Runs the steps of a chunk plan on memory: the one loop over spans, summation orders and kernels.
//
// Ownership: none. Thread-safety: one thread per runner. Aliasing: as in Operation; scratch overlaps nothing. Failure:
// none.
#pragma once

#include <cstddef>
#include <functional>
#include <vector>

#include "collectives/interhost_plan.h"
#include "collectives/order.h"
#include "collectives/plan.h"
#include "kernels/reduce.h"

namespace syncengine {

// Does what kernels::reduce() does. If the operation asks for it, also notes which ranks brought NaN or infinity.
// `input` is the offset, in bytes, of the first result's element in the operation's input. `ranks` has the rank that
// contributed each source, or -1 for a sum of several contributions.
void reduce_noting(const Operation& operation, int world, size_t input, const kernels::Reduction& reduction,
                   const void* const* sources, const int* ranks, int source_count, void* const* destinations,
                   int destination_count, size_t count);
// Notes finite `sums` that became infinite by rounding to the 16-bit `results`, if the operation asks for it.
void note_overflow(const Operation& operation, int world, size_t input, const std::byte* results, const float* sums,
                   size_t count);

// A range of an operation's bytes that is contiguous in its input and in its output, and is summed in one order.
struct Run {
  std::byte *own, *out;  // null: there is no output
  size_t offset, bytes;
};
inline constexpr size_t kNoOutput = ~size_t{0};
// Cuts `bytes` bytes of an operation, which lie from `input` on and whose results go to `output`, into runs, and calls
// `visit` for each. During a call `order` says in which order the contributions of the `sources` ranks are added.
void for_each_run(const Operation& operation, int sources, size_t input, size_t output, size_t bytes,
                  std::vector<int>& order, const std::function<void(const Run& run)>& visit);

class Runner {
 public:
  Runner(int rank, int world) : rank_(rank), world_(world), bases_(world), sources_(world), destinations_(world) {}

  // The base from which a plan's `slot` offsets count, for each rank: its staging slot, or its spans. All ranks' spans
  // have the same lengths, so a range that is contiguous in one rank's is contiguous in all.
  struct Base {
    std::byte* slot = nullptr;
    const SpanList* spans = nullptr;
    std::byte* at(size_t offset) const { return spans ? spans->at(offset) : slot + offset; }
  };
  std::vector<Base>& bases() { return bases_; }

  void stage(const Operation& operation, const ChunkPlan& plan);
  // reduce() and pull() call `stop` between pieces of at most 256 KiB. Once it returns true, they return false.
  bool reduce(const Operation& operation, const ChunkPlan& plan, const std::function<bool()>& stop);
  bool pull(const Operation& operation, const ChunkPlan& plan, const std::function<bool()>& stop);

 private:
  void reduce_run(const Operation& operation, const Reduce& step, size_t offset, const Run& run);

  int rank_, world_;
  std::vector<Base> bases_;
  std::vector<const void*> sources_;
  std::vector<void*> destinations_;
  std::vector<int> order_;
  TreeMerges tree_;
};

// Carries out the acts of an interhost plan on memory: sums over local contributions and what came from other hosts.
class InterhostRunner {
 public:
  explicit InterhostRunner(const Placement& placement) : placement_(placement) {}

  // A cell, and where its bytes are. `bases` are those of the local ranks, by local index.
  struct View {
    const Operation& operation;
    const InterhostCell& cell;
    const std::vector<Runner::Base>& bases;
    bool direct;         // bases are tensors: the cell lies in them at `input`
    bool own_from_slot;  // the own contribution was scaled into the slot
    bool wide;           // partial sums are float32, though the dtype is not
  };

  // The contribution of local rank `rank` as one piece of memory: copied to room() if it lies in several pieces. room()
  // gives cell.bytes bytes, which outlive the transfers.
  const std::byte* contribution(const View& view, int rank, const std::function<std::byte*()>& room) const;

  static size_t partial_bytes(const View& view) { return view.wide ? view.cell.bytes * 2 : view.cell.bytes; }
  // Adds a step's sources up. `received`: memory for each of step.receives. The sum goes into `partial`, of at least
  // partial_bytes(); if that is null, into the output, and to the local peers as the cell's `spreading` says.
  void fold(const View& view, const InterhostStep& step, const std::vector<std::byte*>& received, std::byte* partial);
  // Copies what came for a cell into the output, where it is already if `received` is null, and to the local peers.
  void spread(const View& view, const std::byte* received) const;

 private:
  size_t place(const View& view) const { return view.direct ? view.cell.input : view.cell.slot; }
  bool in_slot(const View& view, int rank) const { return rank != placement_.rank || view.own_from_slot; }
  const Runner::Base& base(const View& view, int rank) const { return view.bases[placement_.local_index(rank)]; }
  void fold_run(const View& view, const InterhostStep& step, const std::vector<std::byte*>& received, const Run& run,
                std::byte* partial);
  void find_merges(const Operation& operation, const InterhostStep& step);
  void fold_wide(const View& view, size_t offset, size_t bytes, std::byte* partial);

  const Placement& placement_;
  std::vector<const void*> sources_;
  std::vector<bool> is_wide_;
  std::vector<void*> destinations_;
  std::vector<int> order_, ranks_;
  TreeMerges tree_;
  std::vector<uint8_t> merges_;  // how the sources of the step's fold are merged, for Tree
  std::vector<float> floats_;
};

}  // namespace syncengine
