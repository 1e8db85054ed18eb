// Makes a communicator of a job's ranks: each publishes an address, learns all others', and connects: with ranks of its
// host through memory, with other hosts through an Interhost.
//
// Ownership: the communicator outlives it. Thread-safety: one thread. Failure: throws; nothing is left behind.
#pragma once

#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "base/texts.h"
#include "bootstrap/fd_exchange.h"
#include "bootstrap/host.h"
#include "engine/communicator/communicator.h"
#include "engine/progress/engine.h"
#include "transport/interhost.h"

namespace syncengine {

class LocalBootstrap {
 public:
  // Without `count_callers` nobody knows which threads may still make a call, so ranks that wait for each other time
  // out. `host_id`: see bootstrap/host.h. `global_ranks` are the ranks' names in texts (empty: their ranks).
  LocalBootstrap(int rank, int size, Options options, CountCallers count_callers = {}, const std::string& host_id = "",
                 std::vector<int> global_ranks = {});

  // Opaque bytes for the launcher to exchange, of the same length on every rank.
  std::string address() const;

  // The host of each rank, numbered from 0 in the order of ranks.
  std::vector<int> hosts(const std::vector<std::string>& addresses) const;
  // Whether the hosts are parts of one machine, in one network namespace.
  bool on_one_network(const std::vector<std::string>& addresses) const;
  // The ranks of this host, by their global names, whose processes can't be watched from here.
  std::vector<int> unseen(const std::vector<std::string>& addresses) const;

  // Connects this rank with other hosts. Called when the host's own ranks have each other's memory.
  using MakeInterhost = std::function<std::unique_ptr<Interhost>()>;

  // Makes the communicator of all ranks. Called once. `addresses` has every rank's address(), by rank. `make_interhost`
  // is needed if there are several hosts.
  std::shared_ptr<Communicator> connect(const std::vector<std::string>& addresses, Deadline deadline,
                                        const std::function<void()>& interrupted = {},
                                        const MakeInterhost& make_interhost = {});

 private:
  struct RankAddress;  // the parts of address()

  RankAddress parse(const std::vector<std::string>& addresses, int rank) const;
  std::map<int, ProcessWatch> watch(const std::vector<RankAddress>& addresses) const;
  std::unique_ptr<shm::PeerArena> map_peer(int rank, int memory, size_t bytes) const;
  std::shared_ptr<Communicator> join(const std::vector<UniqueFd>& memories, const std::vector<RankAddress>& addresses,
                                     const std::vector<int>& host_of, const MakeInterhost& make_interhost);

  int rank_, size_;
  RankNames names_;
  std::string host_key_;
  std::shared_ptr<shm::Arena> arena_;
  std::shared_ptr<Engine> engine_;
  uint64_t block_offset_;
  FdExchange fd_exchange_;
};

}  // namespace syncengine
