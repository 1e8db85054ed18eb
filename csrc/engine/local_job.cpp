#include "engine/local_job.h"

#include <unistd.h>

#include <cstring>
#include <new>

#include "base/resources.h"
#include "base/sync_point.h"
#include "engine/farewell.h"
#include "engine/shm_communicator.h"

namespace syncengine {

struct LocalJob::Address {
  char magic[8] = {'s', 'y', 'n', 'c', 'e', 'n', 'g', '1'};
  uint64_t arena_bytes = 0;
  uint64_t block_offset = 0;
  uint8_t numerics = 0, algorithm = 0;
  char socket[62] = {};
  char host[64] = {};
};

namespace {

size_t arena_bytes(const Options& options) { return options.arena_bytes ? options.arena_bytes : total_memory(); }

LocalJob::Address parse(const std::string& text, int rank) {
  LocalJob::Address address;
  if (text.size() != sizeof(address) || std::memcmp(text.data(), address.magic, sizeof(address.magic)) != 0)
    throw Error(ErrorKind::InvalidUsage, "rank " + std::to_string(rank) + " runs another version of syncengine");
  std::memcpy(&address, text.data(), sizeof(address));
  address.socket[sizeof(address.socket) - 1] = address.host[sizeof(address.host) - 1] = '\0';
  return address;
}

}  // namespace

LocalJob::LocalJob(int rank, int size, Options options, CountCallers count_callers)
    : rank_(rank), size_(size), options_(options) {
  if (size < 2 || size > shm::kMaxLocalRanks || rank < 0 || rank >= size)
    throw Error(ErrorKind::InvalidUsage, "rank " + std::to_string(rank) + " of " + std::to_string(size) +
                                             ": needs 2 to " + std::to_string(shm::kMaxLocalRanks) +
                                             " ranks on one host");
  arena_ = shm::Arena::create(arena_bytes(options));
  block_offset_ = arena_->allocate_group(sizeof(shm::GroupBlock));
  engine_ = std::make_shared<Engine>(arena_, rank, size, options, std::move(count_callers));
}

std::string LocalJob::address() const {
  Address address;
  address.arena_bytes = arena_->bytes();
  address.block_offset = block_offset_;
  address.numerics = static_cast<uint8_t>(options_.numerics);
  address.algorithm = static_cast<uint8_t>(options_.algorithm);
  handoff_.name().copy(address.socket, sizeof(address.socket) - 1);
  gethostname(address.host, sizeof(address.host) - 1);
  return {reinterpret_cast<const char*>(&address), sizeof(address)};
}

std::shared_ptr<Communicator> LocalJob::connect(const std::vector<std::string>& addresses, Deadline deadline,
                                                const std::function<void()>& interrupted,
                                                const std::vector<int>& global_ranks) {
  if (!global_ranks.empty() && global_ranks.size() != static_cast<size_t>(size_))
    throw Error(ErrorKind::InvalidUsage,
                "connect() needs one global rank for each of the " + std::to_string(size_) + " ranks");
  std::vector<Address> parsed;
  std::vector<std::string> names;
  for (int rank = 0; rank < size_; ++rank) {
    parsed.push_back(parse(addresses.at(rank), rank));
    names.emplace_back(parsed[rank].socket);
    if (parsed[rank].numerics != static_cast<uint8_t>(options_.numerics) ||
        parsed[rank].algorithm != static_cast<uint8_t>(options_.algorithm))
      throw Error(ErrorKind::Mismatch, "rank " + std::to_string(rank) + " on " + parsed[rank].host + " and rank " +
                                           std::to_string(rank_) +
                                           " have different numerics or algorithm: pass the same to init()");
  }
  // Peers that have this rank's memory already believe in a communicator: they must hear if there will be none.
  auto& farewell = reinterpret_cast<shm::GroupBlock*>(arena_->at(block_offset_))->farewell;
  try {
    return join(handoff_.exchange(rank_, names, arena_->fd(), deadline, interrupted), parsed, global_ranks);
  } catch (const Error& error) {
    Error told = for_peers(rank_, error);
    say_farewell(farewell, shm::Standing::Failed, told.kind(), told.what());
    throw;
  } catch (const std::bad_alloc&) {
    say_farewell(farewell, shm::Standing::Failed, ErrorKind::Aborted,
                 "rank " + std::to_string(rank_) + " failed in init: out of memory");
    throw;
  } catch (...) {
    say_farewell(farewell, shm::Standing::Failed, ErrorKind::Aborted,
                 "rank " + std::to_string(rank_) + " was interrupted (Ctrl-C) in init()");
    throw;
  }
}

std::shared_ptr<Communicator> LocalJob::join(const std::vector<UniqueFd>& memories,
                                             const std::vector<Address>& addresses,
                                             const std::vector<int>& global_ranks) {
  sync_point("joining");
  std::vector<std::unique_ptr<shm::PeerArena>> peers(size_);
  std::vector<int> ranks;
  std::vector<uint64_t> offsets;
  for (int rank = 0; rank < size_; ++rank) {
    if (rank != rank_)
      peers[rank] = std::make_unique<shm::PeerArena>(memories[rank].get(), addresses[rank].arena_bytes);
    ranks.push_back(rank);
    offsets.push_back(addresses[rank].block_offset);
  }
  arena_->close_fd();
  engine_->attach(std::move(peers));
  return std::make_shared<ShmCommunicator>(engine_, rank_, global_ranks.empty() ? ranks : global_ranks, ranks, offsets,
                                           ShmCommunicator::Origin::Job);
}

}  // namespace syncengine
