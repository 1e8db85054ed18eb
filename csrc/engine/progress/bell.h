// How the threads of a rank sleep and are woken by its peers: one shared futex word a rank, and the peers whose next
// step it needs. A publisher that nobody waits for pays a load per peer.
//
// Thread-safety: any thread; listen() and stop_listening() under the engine's progress lock. Ownership: the arenas
// outlive it. Failure: none; sleeps may return early.
#pragma once

#include <atomic>
#include <cstdint>
#include <vector>

#include "base/deadline.h"
#include "transport/shm/layout.h"

namespace syncengine {

class Bell {
 public:
  // `doorbells` by local rank, the own one among them.
  Bell(std::vector<shm::Doorbell*> doorbells, int local_rank)
      : doorbells_(std::move(doorbells)), local_rank_(local_rank), own_(*doorbells_[local_rank]) {}

  // After a publication: wakes those that sleep until this rank moves.
  void ring_interested() const;
  void ring_all() const;   // whatever they wait for
  void ring_self() const;  // the other threads of this rank

  // Sleeping, in three steps, so that no publication falls between: listen, look again, sleep.
  uint32_t listen(uint64_t interest);
  void listen_for(uint64_t interest);  // instead: what the listeners need has changed; look again afterwards
  void sleep(uint32_t ticket, Duration at_most) const;
  void stop_listening();
  bool anybody_listens() const { return listeners_.load(std::memory_order_seq_cst) > 0; }

 private:
  static void ring(shm::Doorbell& doorbell);

  std::vector<shm::Doorbell*> doorbells_;
  int local_rank_;
  shm::Doorbell& own_;
  std::atomic<int> listeners_{0};
};

}  // namespace syncengine
