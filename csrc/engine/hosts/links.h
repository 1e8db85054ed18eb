// What the parts of one communicator over hosts share: who is where, and how to reach them.
//
// Ownership: keeps the network. Thread-safety: constant after construction, but for what Network says.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "collectives/interhost_plan.h"
#include "engine/hosts/message.h"
#include "engine/hosts/network.h"

namespace syncengine::hosts {

struct Links {
  Placement placement;
  uint32_t group;                 // number of the communicator, the same on all members
  std::vector<int> job_ranks;     // of each member: what the network calls it
  std::vector<int> global_ranks;  // of each member: what messages call it
  std::vector<int> counterparts;  // members
  std::shared_ptr<Network> network;
  InterhostChoice choice = {};  // changes only when all members have run the same operations

  std::string name(int member) const { return "rank " + std::to_string(global_ranks[member]); }
  bool is_remote(int member) const { return placement.host_of[member] != placement.host; }
  // The first rank of each host speaks for it in what concerns the order of announced operations.
  int leader(int host) const { return placement.members[host].front(); }
  bool leads_host() const { return leader(placement.host) == placement.rank; }
  bool leads_job() const { return placement.rank == 0; }

  template <class Message>
  void tell(int member, const Message& message) const {
    tell(member, write(group, message));
  }
  void tell(int member, const std::string& message) const {
    network->interhost().tell(job_ranks[member], message);
    network->notify();
  }
  std::shared_ptr<Interhost::Transfer> send(int member, uint64_t tag, const std::byte* data, size_t bytes) const {
    return network->interhost().send(job_ranks[member], tag, data, bytes);
  }
  std::shared_ptr<Interhost::Transfer> receive(int member, uint64_t tag, std::byte* data, size_t bytes) const {
    return network->interhost().receive(job_ranks[member], tag, data, bytes);
  }
};

}  // namespace syncengine::hosts
