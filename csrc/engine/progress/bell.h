// How the threads of a rank sleep and are woken by its peers: one shared futex word a rank, and the peers whose next
// step it needs. A publisher that nobody waits for pays a load per peer.
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
  // `doorbells` by local rank, the own one among them.
  Bell(std::vector<shm::Doorbell*> doorbells, int local_rank)
      : doorbells_(std::move(doorbells)), local_rank_(local_rank), own_(*doorbells_[local_rank]) {}

  // After a publication: wakes those that sleep until this rank moves.
  void ring_interested() const {
    // The publication before, the load of `interest` after: with the mirror image in listen(), one side sees the other.
    std::atomic_thread_fence(std::memory_order_seq_cst);
    for (auto* doorbell : doorbells_) {
      const uint64_t interest = doorbell->interest.load(std::memory_order_relaxed);  // relaxed: the fence orders it
      if (interest >> local_rank_ & 1 && doorbell != &own_) ring(*doorbell);
    }
  }
  // Whatever they wait for.
  void ring_all() const {
    for (auto* doorbell : doorbells_) ring(*doorbell);
  }
  void ring_self() const { ring(own_); }  // the other threads of this rank

  // Sleeping, in three steps, so that no publication falls between: listen, look again, sleep.
  uint32_t listen(uint64_t interest) {
    uint32_t ticket = own_.rings.load(std::memory_order_seq_cst);
    listeners_.fetch_add(1, std::memory_order_seq_cst);
    listen_for(interest);
    return ticket;
  }
  // Instead: what the listeners need has changed; look again afterwards.
  void listen_for(uint64_t interest) {
    own_.interest.store(interest, std::memory_order_relaxed);  // relaxed: the fence orders it
    std::atomic_thread_fence(std::memory_order_seq_cst);
  }
  void sleep(uint32_t ticket, Duration at_most) const { futex_wait(own_.rings, ticket, at_most); }
  void stop_listening() {
    // Another thread may still listen: then the interest stays, and costs at most a needless ring.
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
