// Lets the threads of a rank sleep, and peers wake them: one shared futex word a rank, and a mask of the peers whose
// next step the sleepers need. A publisher that nobody waits for pays only a fence, and a load per peer.
//
// Thread-safety: any thread; listen() and stop_listening() under the engine's progress lock. Ownership: the arenas
// outlive it. Failure: none; sleeps may return early.
#pragma once

#include <atomic>
#include <cstdint>
#include <utility>
#include <vector>

#include "base/deadline.h"
#include "base/thread.h"
#include "transport/shm/layout.h"

namespace syncengine {

class Bell {
 public:
  // `doorbells` are by local rank, this rank's among them.
  Bell(std::vector<shm::Doorbell*> doorbells, int local_rank)
      : doorbells_(std::move(doorbells)), local_rank_(local_rank), own_(*doorbells_[local_rank]) {}

  // Called after a publication: wakes the ranks that sleep until this rank moves.
  void ring_interested() const {
    // The publication comes before the fence, and the load of `interest` after it. listen() does both in the opposite
    // order, so one side sees the other.
    std::atomic_thread_fence(std::memory_order_seq_cst);
    for (auto* doorbell : doorbells_) {
      const uint64_t interest = doorbell->interest.load(std::memory_order_relaxed);  // relaxed: the fence orders it
      if (interest >> local_rank_ & 1 && doorbell != &own_) ring(*doorbell);
    }
  }
  // Wakes all sleeping threads of this host's ranks, whichever ranks they wait for.
  void ring_all() const {
    for (auto* doorbell : doorbells_) ring(*doorbell);
  }
  void ring_self() const { ring(own_); }  // the other threads of this rank

  // Sleeping takes three steps, so that no publication falls between them: listen, look again, sleep.
  uint32_t listen(uint64_t interest) {
    uint32_t ticket = own_.rings.load(std::memory_order_seq_cst);
    listeners_.fetch_add(1, std::memory_order_seq_cst);
    listen_for(interest);
    return ticket;
  }
  // Replaces the listeners' interest, since they wait for other ranks now. The caller looks again afterwards.
  void listen_for(uint64_t interest) {
    own_.interest.store(interest, std::memory_order_relaxed);  // relaxed: the fence orders it
    std::atomic_thread_fence(std::memory_order_seq_cst);
  }
  void sleep(uint32_t ticket, Duration at_most) const { futex_wait(own_.rings, ticket, at_most); }
  void stop_listening() {
    // If another thread still listens, the interest stays, which costs a needless ring at most.
    if (listeners_.fetch_sub(1, std::memory_order_seq_cst) == 1) own_.interest.store(0, std::memory_order_relaxed);
  }
  bool anybody_listens() const { return listeners_.load(std::memory_order_seq_cst) > 0; }

 private:
  static void ring(shm::Doorbell& doorbell) {
    doorbell.rings.fetch_add(1, std::memory_order_seq_cst);
    futex_wake_all(doorbell.rings);
  }

  std::vector<shm::Doorbell*> doorbells_;
  int local_rank_;
  shm::Doorbell& own_;
  std::atomic<int> listeners_{0};
};

}  // namespace syncengine
