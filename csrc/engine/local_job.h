// How the ranks of one host become a communicator: publish an address, learn everybody's, connect.
//
// Ownership: the communicator outlives it. Thread-safety: one thread. Failure: throws; nothing is left behind.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "bootstrap/handoff.h"
#include "engine/communicator.h"
#include "engine/engine.h"

namespace syncengine {

class LocalJob {
 public:
  // Without `count_callers` nobody knows which thread may still make a call, and ranks that wait for each other time out.
  LocalJob(int rank, int size, Options options, CountCallers count_callers = {});

  // Opaque bytes for the launcher to exchange; the same length on every rank.
  std::string address() const;

  // `addresses` by rank, the own one among them; `global_ranks` is what messages call the ranks (empty: as they are). Once.
  std::shared_ptr<Communicator> connect(const std::vector<std::string>& addresses, Deadline deadline,
                                        const std::function<void()>& interrupted = {},
                                        const std::vector<int>& global_ranks = {});

  struct Address;  // what address() is made of

 private:
  std::shared_ptr<Communicator> join(const std::vector<UniqueFd>& memories, const std::vector<Address>& addresses,
                                     const std::vector<int>& global_ranks);

  int rank_, size_;
  Options options_;
  std::shared_ptr<shm::Arena> arena_;
  std::shared_ptr<Engine> engine_;
  uint64_t block_offset_;
  Handoff handoff_;
};

}  // namespace syncengine
