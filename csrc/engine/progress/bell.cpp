#include "engine/progress/bell.h"

#include "base/thread.h"

namespace syncengine {

void Bell::ring(shm::Doorbell& doorbell) {
  doorbell.rings.fetch_add(1, std::memory_order_seq_cst);
  futex_wake_all(doorbell.rings);
}

void Bell::ring_interested() const {
  // The publication before, the load of `interest` after: with the mirror image in listen(), one side sees the other.
  std::atomic_thread_fence(std::memory_order_seq_cst);
  for (int rank = 0; rank < static_cast<int>(doorbells_.size()); ++rank) {
    bool wanted =
        doorbells_[rank]->interest.load(std::memory_order_relaxed) >> local_rank_ & 1;  // relaxed: the fence orders it
    if (wanted && rank != local_rank_) ring(*doorbells_[rank]);
  }
}

void Bell::ring_all() const {
  for (auto* doorbell : doorbells_) ring(*doorbell);
}

void Bell::ring_self() const { ring(own_); }

uint32_t Bell::listen(uint64_t interest) {
  uint32_t ticket = own_.rings.load(std::memory_order_seq_cst);
  listeners_.fetch_add(1, std::memory_order_seq_cst);
  listen_for(interest);
  return ticket;
}

void Bell::listen_for(uint64_t interest) {
  own_.interest.store(interest, std::memory_order_relaxed);  // relaxed: the fence orders it
  std::atomic_thread_fence(std::memory_order_seq_cst);
}

void Bell::sleep(uint32_t ticket, Duration at_most) const { futex_wait(own_.rings, ticket, at_most); }

void Bell::stop_listening() {
  // Another thread may still listen: then the interest stays, and costs at most a needless ring.
  if (listeners_.fetch_sub(1, std::memory_order_seq_cst) == 1) own_.interest.store(0, std::memory_order_relaxed);
}

}  // namespace syncengine
