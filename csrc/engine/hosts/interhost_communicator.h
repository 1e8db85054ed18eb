// A communicator whose members live on several hosts: a communicator of this host's members in shared memory, whose
// lanes and schedule reach over to the others.
//
// It fails as one: what fails it here is told to all members on other hosts at once, and so to theirs.
#pragma once

#include <map>

#include "engine/communicator/shm_communicator.h"
#include "engine/hosts/interhost_exchange.h"
#include "engine/hosts/interhost_route.h"
#include "engine/hosts/interhost_schedule.h"
#include "engine/hosts/links.h"

namespace syncengine::hosts {

// A member, as it is known on every rank.
struct Member {
  int label;            // equal for two members if and only if they share memory
  int job_rank;         // in the job
  int global_rank;      // for messages
  int local_rank = -1;  // among the engine's arenas, if it shares this rank's host
  uint64_t offset = 0;  // of its block in its arena; the same
};

struct InterhostParts {  // a base, since it is there before what refers to it; which owns the others
  Links links_;
  InterhostExchange* exchanges_[shm::kLanes] = {};  // by lane
  InterhostSchedule* interhost_schedule_ = nullptr;
  InterhostRoute* interhost_route_ = nullptr;
};

class InterhostCommunicator final : private InterhostParts, public ShmCommunicator, private Listener {
 public:
  static std::shared_ptr<InterhostCommunicator> create(std::shared_ptr<Network> network, uint32_t group, int rank,
                                                       const std::vector<Member>& members, Origin origin);
  ~InterhostCommunicator() override;

  int rank() const override { return links_.placement.rank; }
  int size() const override { return links_.placement.size; }
  const std::vector<int>& global_ranks() const override { return links_.global_ranks; }
  bool spans_hosts() const override { return true; }
  std::vector<int> hosts() const override { return links_.placement.host_of; }
  bool has_device_transport() const override { return links_.network->interhost().has_device_transport(); }
  std::unique_ptr<DeviceTransport> open_device_transport(int device, const std::string& name) override {
    return links_.network->interhost().open_device_transport(links_.job_ranks, device, name);
  }
  std::string describe_links() const override;

  // Collective, before anything else: how fast the links are, for this communicator and all that are split from it.
  void measure(const std::function<void()>& interrupted);

 private:
  InterhostCommunicator(Links links, const Group& locals, Origin origin);

  void hear(int peer, const std::string& message) override;
  void give_up(const Error& error) override { ShmCommunicator::fail(error.kind(), error.what()); }
  void hear_ended(int member, const Ended& ended);

  // A rank that shares its host waits for that one's ranks as well.
  IoLoop* io_loop() override { return group_.size == 1 && engine_->is_alone() ? links_.network.get() : nullptr; }
  void check_health() override;
  bool have_all_others_left() const override;
  void fail(ErrorKind kind, const std::string& text) override;
  void end(shm::Standing standing, const Error& for_peers, const Error& raised_here) override;
  void check_remote_members();
  void tell_who_is_late();
  uint64_t absent_here() const;
  std::string names_of_blocking_ranks(const Pending& pending) const override;
  uint64_t take_number(uint64_t members) override;
  std::shared_ptr<void> expect_group() override;
  std::shared_ptr<Communicator> join(const std::vector<int>& members, const std::vector<Ticket>& tickets) override;

  std::map<int, int> member_of_;  // by rank of the job
  std::map<int, Ended> left_;     // members that left, and what they had completed
  std::map<int, uint64_t> late_;  // for whom members of other hosts wait
  uint64_t told_late_ = 0;
};

}  // namespace syncengine::hosts
