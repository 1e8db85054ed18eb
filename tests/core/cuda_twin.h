// A GPU rank's stream, on the CPU: the same sequences and kernel bodies, run by the rank's thread, with atomics for words.
#pragma once

#include <cstring>
#include <functional>
#include <memory>
#include <thread>
#include <vector>

#include "cuda/kernel_choice.h"
#include "cuda/sequence.h"
#include "test.h"

namespace syncengine::testing {

// A kernel by its bodies, as a grid of `threads` that run one after the other.
inline void run_reduce(const kernels::Reduction& reduction, const cuda::ReduceArgs& args, int threads = 3) {
  cuda::visit_instance(reduction.dtype, reduction.op, reduction.rounding, args.source_count, [&](auto instance) {
    using I = decltype(instance);
    for (int thread = 0; thread < threads; ++thread)
      cuda::reduce_share<typename I::Element, typename I::Op, I::kRounding, I::kSources>(args, thread, threads);
  });
}

inline bool passes(const cuda::Gate& gate) {
  if (!gate.words) return true;
  cuda::count_progress(gate);
  bool shut = false;
  for (int i = 0; i < gate.world; ++i) shut |= cuda::is_shut(gate, i);
  return !shut;
}

class TwinSteps : public cuda::Steps {
 public:
  TwinSteps(int rank, std::vector<cuda::Control*> controls) : rank_(rank), controls_(std::move(controls)) {}

  // While capturing, steps are kept instead of run. replay() runs what was kept, as often as one likes.
  void begin_capture() { capturing_ = true; }
  void end_capture() { capturing_ = false; }
  void replay() {
    for (auto& step : captured_) step();
  }

  void exchange(const cuda::Exchange& exchange) override {
    step([this, exchange] { run(exchange); });
  }
  void reduce(const kernels::Reduction& reduction, const cuda::ReduceArgs& args) override {
    step([reduction, args] {
      if (passes(args.gate)) return run_reduce(reduction, args);
      cuda::poison_share(args, element_size(reduction.dtype), 0, 1);
    });
  }
  void copy(const cuda::CopyArgs& args) override {
    step([args] {
      bool good = passes(args.gate);
      for (int piece = 0; piece < args.pieces; ++piece) {
        if (good) cuda::copy_share(args, piece, 0, 1);
        if (!good) cuda::poison_bytes(args.destinations[piece], args.bytes[piece], 0, 1);
      }
    });
  }

 private:
  void step(std::function<void()> run) {
    if (capturing_) return captured_.push_back(std::move(run));
    run();
  }

  void run(const cuda::Exchange& exchange) {
    if (exchange.reset >= 0) reset(exchange.reset);
    cuda::store(own().waiting, exchange.set + 1);
    for (int peer = 0; peer < world(); ++peer) {
      if (peer == rank_) continue;
      uint32_t before = __atomic_exchange_n(&controls_[peer]->inbox[exchange.set][rank_], exchange.value, __ATOMIC_ACQ_REL);
      CHECK(before == 0 || before == cuda::kReleased);  // else a signal is lost
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
  TwinGroup(int world, size_t slot_bytes, bool push) : slot_bytes(slot_bytes), push(push) {
    for (int rank = 0; rank < world; ++rank) {
      owned.push_back(std::make_unique<cuda::Control>());
      std::memset(static_cast<void*>(owned.back().get()), 0, sizeof(cuda::Control));
      controls.push_back(owned.back().get());
      staging.emplace_back(2 * slot_bytes);
      slots.push_back(staging.back().data());
    }
  }
  cuda::Site site(int rank) const {
    return {.rank = rank,
            .world = static_cast<int>(controls.size()),
            .control = controls[rank],
            .slots = slots,
            .slot_bytes = slot_bytes,
            .push = push};
  }

  size_t slot_bytes;
  bool push;
  std::vector<std::unique_ptr<cuda::Control>> owned;
  std::vector<cuda::Control*> controls;
  std::vector<std::vector<std::byte>> staging;
  std::vector<std::byte*> slots;
};

}  // namespace syncengine::testing
