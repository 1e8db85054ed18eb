#include "cuda/device/stream_steps.h"

#include <cstdlib>
#include <utility>

#include "base/sync_point.h"
#include "cuda/device/kernels.h"

namespace syncengine::cuda {

bool fakes_arrivals() {
  static const bool fakes = has_test_hooks() && std::getenv("SYNCENGINE_TEST_FAKE_ARRIVALS") != nullptr;
  return fakes;
}

// All of an exchange is one call of the driver, and one node of a graph. A write comes after all that the stream did
// before it, for whoever sees the written word (the default of cuStreamWriteValue32); operations of a batch run in
// their order.
void StreamSteps::exchange(const Exchange& exchange) {
  const int world = static_cast<int>(controls_.size());
  operations_.clear();
  if (exchange.reset >= 0) reset(exchange.reset);
  write(&controls_[rank_]->waiting, exchange.set + 1);
  for (int peer = 0; peer < world; ++peer) {
    if (peer == rank_) continue;
    auto [to, from] = fakes_arrivals() ? std::pair(rank_, peer) : std::pair(peer, rank_);
    write(&controls_[to]->inbox[exchange.set][from], exchange.value);
  }
  for (int peer = 0; peer < world; ++peer)
    if (peer != rank_) wait(&controls_[rank_]->inbox[exchange.set][peer]);
  if (exchange.last) reset(exchange.set);
  write(&controls_[rank_]->waiting, 0);
  check(driver().stream_batch_mem_op(stream_, static_cast<unsigned>(operations_.size()), operations_.data(), 0),
        "queueing signals");
}

void StreamSteps::reduce(const kernels::Reduction& reduction, const ReduceArgs& args) {
  launch_reduce(reduction, args, blocks_, stream_);
}

void StreamSteps::copy(const CopyArgs& args) { launch_copy(args, blocks_, stream_); }

void StreamSteps::one_shot(const kernels::Reduction& reduction, const OneShotArgs& args) {
  launch_one_shot(reduction, args, stream_);
}

void StreamSteps::write(const uint32_t* word, uint32_t value) { operations_.push_back(write_word(word, value)); }

void StreamSteps::wait(const uint32_t* word) { operations_.push_back(wait_for_word(word)); }

void StreamSteps::reset(int set) {
  for (int peer = 0; peer < static_cast<int>(controls_.size()); ++peer)
    if (peer != rank_) write(&controls_[rank_]->inbox[set][peer], 0);
}

}  // namespace syncengine::cuda
