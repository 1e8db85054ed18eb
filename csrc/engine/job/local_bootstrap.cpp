#include "engine/job/local_bootstrap.h"

#include <cstring>

#include "base/checked.h"
#include "base/error.h"
#include "base/resources.h"
#include "base/sync_point.h"
#include "engine/communicator/engine_communicator.h"
#include "engine/communicator/membership.h"
#include "engine/hosts/interhost_members.h"

namespace syncengine {

struct LocalBootstrap::RankAddress {
  char magic[8] = {'s', 'y', 'n', 'c', 'e', 'n', 'g', ' '};
  uint64_t arena_bytes = 0;
  uint64_t block_offset = 0;
  char fd_exchange[FdExchange::kMostAddress] = {};  // contains a secret: for the ranks alone
  char host_key[kMostHostKey] = {};                 // equal on ranks that share memory
};

LocalBootstrap::LocalBootstrap(int rank, int size, Options options, CountCallers count_callers,
                               const std::string& host_id, std::vector<int> global_ranks)
    : rank_(rank), size_(size), names_{global_ranks}, host_key_(host_key(host_id)) {
  if (size < 2 || size > shm::kMaxLocalRanks || rank < 0 || rank >= size)
    throw Error(ErrorKind::InvalidUsage, "rank " + std::to_string(rank) + " of " + std::to_string(size) +
                                             ": needs 2 to " + std::to_string(shm::kMaxLocalRanks) + " ranks");
  if (!global_ranks.empty() && global_ranks.size() != static_cast<size_t>(size))
    throw Error(ErrorKind::InvalidUsage, "needs one global rank for each of the " + std::to_string(size) + " ranks");
  arena_ =
      shm::Arena::create(options.arena_bytes ? options.arena_bytes : shm::default_arena_bytes(total_memory(), size));
  block_offset_ = arena_->allocate_group(sizeof(shm::GroupBlock));
  engine_ = std::shared_ptr<Engine>(new Engine(arena_, size, options, std::move(count_callers)), &Engine::destroy);
}

std::string LocalBootstrap::address() const {
  RankAddress address{.arena_bytes = arena_->bytes(), .block_offset = block_offset_};
  fd_exchange_.address().copy(address.fd_exchange, sizeof(address.fd_exchange) - 1);
  host_key_.copy(address.host_key, sizeof(address.host_key) - 1);
  return {reinterpret_cast<const char*>(&address), sizeof(address)};
}

LocalBootstrap::RankAddress LocalBootstrap::parse(const std::vector<std::string>& addresses, int rank) const {
  const std::string& text = addresses.at(rank);
  RankAddress address;
  if (text.size() != sizeof(address) || std::memcmp(text.data(), address.magic, sizeof(address.magic)) != 0)
    throw Error(ErrorKind::InvalidUsage, names_(rank) + " gave no address of syncengine's");
  std::memcpy(&address, text.data(), sizeof(address));
  return address;
}

std::vector<int> LocalBootstrap::hosts(const std::vector<std::string>& addresses) const {
  std::vector<std::string> keys;
  for (int rank = 0; rank < size_; ++rank) keys.push_back(checked_text(parse(addresses, rank).host_key));
  return number_hosts(keys);
}

bool LocalBootstrap::on_one_network(const std::vector<std::string>& addresses) const {
  std::string own = network_of(host_key_);
  for (int rank = 0; rank < size_; ++rank)
    if (network_of(checked_text(parse(addresses, rank).host_key)) != own) return false;
  return true;
}

std::vector<int> LocalBootstrap::unseen(const std::vector<std::string>& addresses) const {
  std::vector<int> unseen, on = hosts(addresses);
  for (int rank = 0; rank < size_; ++rank) {
    if (rank == rank_ || on[rank] != on[rank_]) continue;
    if (!ProcessWatch(FdExchange::process_of(checked_text(parse(addresses, rank).fd_exchange))).sees())
      unseen.push_back(names_.global(rank));
  }
  return unseen;
}

std::shared_ptr<Communicator> LocalBootstrap::connect(const std::vector<std::string>& addresses, Deadline deadline,
                                                      const std::function<void()>& interrupted,
                                                      const MakeInterhost& make_interhost) {
  std::vector<RankAddress> parsed;
  std::vector<std::string> fd_exchanges;
  std::vector<int> on = hosts(addresses);
  for (int rank = 0; rank < size_; ++rank) {
    parsed.push_back(parse(addresses, rank));
    fd_exchanges.push_back(on[rank] == on[rank_] ? checked_text(parsed[rank].fd_exchange) : "");
  }
  // Peers that have this rank's memory believe that the communicator exists, so they must be told if it can't be made.
  auto& end_record = reinterpret_cast<shm::GroupBlock*>(arena_->at(block_offset_))->end_record;
  try {
    auto joined = join(fd_exchange_.exchange(rank_, fd_exchanges, arena_->fd(), deadline, interrupted, names_), parsed,
                       on, make_interhost);
    if (!joined->spans_hosts()) return joined;
    // A barrier, so that no rank leaves before all are connected: to one that is not, that would look like a failure.
    Operation barrier{.collective = Collective::Barrier};
    barrier.describe = [] { return std::string("syncengine.init()"); };
    joined->run(std::move(barrier), interrupted);
    return joined;
  } catch (...) {
    const Error told = for_peers(names_(rank_), std::current_exception());
    write_end_record(end_record, shm::Standing::Failed, told.kind(), told.what());
    throw;
  }
}

std::unique_ptr<shm::PeerArena> LocalBootstrap::map_peer(int rank, int memory, size_t bytes) const {
  try {
    return std::make_unique<shm::PeerArena>(memory, bytes);
  } catch (const Error& error) {
    throw Error(error.kind(), names_(rank_) + " can't map the memory of " + names_(rank) + ": " + error.what());
  }
}

std::map<int, ProcessWatch> LocalBootstrap::watch(const std::vector<RankAddress>& addresses) const {
  std::map<int, ProcessWatch> watches;
  for (int rank = 0; rank < size_; ++rank) {
    const std::string key = checked_text(addresses[rank].host_key);
    if (rank == rank_ || machine_of(key) != machine_of(host_key_)) continue;
    ProcessWatch process(FdExchange::process_of(checked_text(addresses[rank].fd_exchange)));
    // Machines that are copies of each other can't be told apart by their keys, so a process of another host that seems
    // to have ended may live on another machine: it is not watched.
    if (process.sees() && (key == host_key_ || !process.has_ended()))
      watches.emplace(names_.global(rank), std::move(process));
  }
  return watches;
}

std::shared_ptr<Communicator> LocalBootstrap::join(const std::vector<UniqueFd>& memories,
                                                   const std::vector<RankAddress>& addresses,
                                                   const std::vector<int>& host_of,
                                                   const MakeInterhost& make_interhost) {
  sync_point("joining");
  Placement placement(rank_, host_of);
  std::vector<std::unique_ptr<shm::PeerArena>> peers;
  std::vector<int> names, local_names, local_ranks, job_ranks;
  std::vector<uint64_t> offsets;
  for (int rank = 0; rank < size_; ++rank) {
    names.push_back(names_.global(rank));
    job_ranks.push_back(rank);
  }
  for (int rank : placement.locals()) {
    local_names.push_back(names[rank]);
    local_ranks.push_back(static_cast<int>(peers.size()));
    offsets.push_back(addresses[rank].block_offset);
    peers.push_back(rank == rank_ ? nullptr : map_peer(rank, memories[rank].get(), addresses[rank].arena_bytes));
  }
  engine_->attach(std::move(peers), placement.local_index(rank_), std::move(local_names), watch(addresses));
  std::unique_ptr<hosts::InterhostMembers> interhost;
  if (placement.hosts() > 1) {
    if (!make_interhost)
      throw Error(ErrorKind::InvalidUsage, "the ranks run on several hosts, and nothing connects these");
    std::shared_ptr<hosts::Network> network(new hosts::Network(engine_, make_interhost()), &hosts::Network::destroy);
    interhost = std::make_unique<hosts::InterhostMembers>(std::move(network), hosts::kJobGroup, placement,
                                                          std::move(job_ranks), names);
  }
  auto members = Members::make(*engine_, std::move(placement), std::move(names), std::move(local_ranks),
                               std::move(offsets), std::move(interhost));
  return std::make_shared<EngineCommunicator>(engine_, std::move(members), Membership::Origin::Job);
}

}  // namespace syncengine
