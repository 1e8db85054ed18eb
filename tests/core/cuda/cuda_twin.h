// A GPU rank's stream, on the CPU: the same sequences and kernel bodies, run by the rank's thread, with atomics for
// words.
#pragma once

#include <cstring>
#include <functional>
#include <memory>
#include <thread>
#include <vector>

#include "cuda/body.h"
#include "cuda/sequence.h"
#include "test.h"

namespace syncengine::testing {

// A kernel by its bodies, as a grid of `threads` that run one after the other.
template <class Args>
void run_reduce(const kernels::Reduction& reduction, const Args& args, int threads = 3) {
  cuda::visit_dtype(reduction.dtype, [&]<class Element>(Element) {
    cuda::visit_element<Element>(reduction.op, reduction.rounding, args.source_count,
                                 [&]<class E, class Op, kernels::Rounding kRounding, int kSources>() {
                                   for (int thread = 0; thread < threads; ++thread)
                                     cuda::reduce_share<E, Op, kRounding, kSources>(args, thread, threads);
                                 });
  });
}

inline void run_note(const kernels::Reduction& reduction, const cuda::NoteArgs& args, int threads = 3) {
  cuda::visit_dtype(reduction.dtype, [&]<class Element>(Element) {
    if constexpr (Element::kFloating) {
      const auto share = reduction.rounding == kernels::Rounding::Once
                             ? cuda::note_share<Element, kernels::Rounding::Once>
                             : cuda::note_share<Element, kernels::Rounding::EveryHop>;
      for (int thread = 0; thread < threads; ++thread) share(args, thread, threads);
    }
  });
}

inline bool passes(const cuda::Gate& gate) {
  if (!gate.words) return true;
  cuda::count_progress(*gate.control);
  bool shut = false;
  for (int i = 0; i < gate.world; ++i) shut |= cuda::is_shut(gate, i);
  return !shut;
}

class TwinSteps : public cuda::Steps {
 public:
  TwinSteps(int rank, std::vector<cuda::Control*> controls) : rank_(rank), controls_(std::move(controls)) {}

  bool orderly = true;  // false: peers may have been released, and do not take signals away

  // While capturing, steps are kept instead of run. replay() runs what was kept, as often as one likes.
  void begin_capture() { capturing_ = true; }
  void end_capture() { capturing_ = false; }
  void replay() {
    for (auto& step : captured_) step();
  }

  void exchange(const cuda::WordExchange& exchange) override {
    step([this, exchange] { run(exchange); });
  }
  void reduce(const kernels::Reduction& reduction, const cuda::ReduceArgs& args) override {
    step([reduction, args] {
      if (passes(args.gate)) return run_reduce(reduction, args);
      cuda::poison_share(args, element_size(reduction.dtype), 0, 1);
    });
  }
  void note(const kernels::Reduction& reduction, const cuda::NoteArgs& args) override {
    step([reduction, args] {
      if (passes(args.sum.gate)) run_note(reduction, args);
    });
  }
  void copy(const cuda::CopyArgs& args) override {
    step([args] {
      bool good = passes(args.gate);
      for (int piece = 0; piece < args.pieces; ++piece) {
        if (good) cuda::copy_run(args.destinations[piece], args.sources[piece], args.bytes[piece], 0, 1);
        if (!good) cuda::poison_bytes(args.destinations[piece], args.bytes[piece], 0, 1);
      }
    });
  }
  // Blocks run one after the other: none waits for another one.
  void in_kernel(const kernels::Reduction& reduction, const cuda::InKernelArgs& args) override {
    step([this, reduction, args] {
      const int blocks = 1 + static_cast<int>(args.bytes / 128 % 3);
      for (int block = 0; block < blocks; ++block) {
        const cuda::ByteRun part = cuda::piece_of({0, args.bytes}, block, blocks);
        if (!run_block(reduction, args, block, blocks, part))
          cuda::poison_bytes(static_cast<std::byte*>(args.output) + part.begin, part.bytes, 0, 1);
      }
      cuda::count_progress(own());
    });
  }

 private:
  static bool run_block(const kernels::Reduction& reduction, const cuda::InKernelArgs& args, int block, int blocks,
                        cuda::ByteRun part) {
    cuda::InKernelArea& area = *args.areas[args.rank];
    const uint32_t call = area.calls[block] + 1, half = call & 1;
    if (cuda::has_failed(area, call)) return false;
    cuda::copy_run(area.slots[half] + part.begin, static_cast<const std::byte*>(args.input) + part.begin, part.bytes, 0,
                   1);
    const bool open = meet({args, block, 0, call});
    for (int thread = 0; thread < cuda::kInKernelBlocks; ++thread) cuda::count_call(area, block, blocks, thread, call);
    if (!open) return cuda::note_failure(area, call), false;
    const cuda::ByteRun run = args.shots == 1 ? part : cuda::piece_of(part, args.rank, args.world);
    run_reduce(reduction, cuda::SlotsReduction{args, half, run.begin, run.bytes / element_size(reduction.dtype)});
    if (args.shots == 1) return true;
    if (!meet({args, block, 1, call})) return cuda::note_failure(area, call), false;
    for (int thread = 0; thread < 3; ++thread) cuda::take_slices(args, part, half, thread, 3);
    return true;
  }

  static bool meet(const cuda::BlockMeeting& meeting) {
    bool good = true;
    const cuda::InKernelArgs& args = meeting.args;
    for (int peer = 0; peer < args.world; ++peer)
      if (peer != args.rank) meeting.tell(peer);
    for (int peer = 0; peer < args.world; ++peer) {
      if (peer == args.rank) continue;
      auto arrival = cuda::MarkState::NotYet;
      while ((arrival = meeting.look_for(peer)) == cuda::MarkState::NotYet) {
        if (cuda::load(args.control->aborted)) arrival = cuda::MarkState::Bad;
        if (arrival == cuda::MarkState::Bad) break;
        std::this_thread::yield();
      }
      good &= arrival == cuda::MarkState::Here;
    }
    return good;
  }

  void step(std::function<void()> run) {
    if (capturing_) return captured_.push_back(std::move(run));
    run();
  }

  void run(const cuda::WordExchange& exchange) {
    if (exchange.reset >= 0) reset(exchange.reset);
    cuda::store(own().waiting, exchange.set + 1);
    for (int peer = 0; peer < world(); ++peer) {
      if (peer == rank_) continue;
      uint32_t before =
          __atomic_exchange_n(&controls_[peer]->inbox[exchange.set][rank_], exchange.value, __ATOMIC_ACQ_REL);
      if (orderly) CHECK(before == 0 || before == cuda::kReleased);  // else a signal is lost
    }
    for (int peer = 0; peer < world(); ++peer) {
      if (peer == rank_) continue;
      while (!(cuda::load(own().inbox[exchange.set][peer]) & cuda::kArrived)) std::this_thread::yield();
    }
    if (exchange.last) reset(exchange.set);
    cuda::store(own().waiting, 0);
  }

  void reset(int set) {
    for (int peer = 0; peer < world(); ++peer)
      if (peer != rank_) cuda::store(own().inbox[set][peer], 0);
  }

  int world() const { return static_cast<int>(controls_.size()); }
  cuda::Control& own() { return *controls_[rank_]; }

  int rank_;
  std::vector<cuda::Control*> controls_;
  bool capturing_ = false;
  std::vector<std::function<void()>> captured_;
};

// The memory of `world` ranks: words and staging.
struct TwinGroup {
  // `one_kernel`: sums of floats take cuda/in_kernel.h.
  TwinGroup(int world, size_t slot_bytes, bool one_kernel = false) : slot_bytes(slot_bytes) {
    for (int rank = 0; rank < world; ++rank) {
      owned.push_back(std::make_unique<cuda::Control>());
      std::memset(static_cast<void*>(owned.back().get()), 0, sizeof(cuda::Control));
      controls.push_back(owned.back().get());
      staging.emplace_back(2 * slot_bytes);
      slots.push_back(staging.back().data());
      if (!one_kernel) continue;
      owned_areas.push_back(std::make_unique_for_overwrite<cuda::InKernelArea>());
      areas.push_back(owned_areas.back().get());
      std::memset(static_cast<void*>(areas.back()), 0, offsetof(cuda::InKernelArea, slots));
    }
  }
  cuda::Site site(int rank) const {
    return {.rank = rank,
            .world = static_cast<int>(controls.size()),
            .control = controls[rank],
            .slots = slots,
            .areas = areas,
            .slot_bytes = slot_bytes};
  }

  size_t slot_bytes;
  std::vector<std::unique_ptr<cuda::Control>> owned;
  std::vector<cuda::Control*> controls;
  std::vector<std::vector<std::byte>> staging;
  std::vector<std::byte*> slots;
  std::vector<std::unique_ptr<cuda::InKernelArea>> owned_areas;
  std::vector<cuda::InKernelArea*> areas;
};

}  // namespace syncengine::testing
