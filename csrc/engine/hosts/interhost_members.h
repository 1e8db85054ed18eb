// The interhost part of a communicator: what of its traffic goes to members on other hosts, what they tell, and how
// they end.
//
// A communicator fails as one: what fails it here is told to all members on other hosts at once, and so to theirs.
//
// Ownership, thread-safety: as InterhostPart. Failure: hear() throws PeerLost for what no peer should send.
#pragma once

#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "engine/communicator/interhost_part.h"
#include "engine/communicator/traffic.h"
#include "engine/hosts/interhost_exchange.h"
#include "engine/hosts/interhost_route.h"
#include "engine/hosts/interhost_schedule.h"
#include "engine/hosts/links.h"

namespace syncengine::hosts {

class InterhostMembers final : public InterhostPart, private Listener {
 public:
  // `group`: the communicator's number; `job_ranks`, `global_ranks` as in Links.
  InterhostMembers(std::shared_ptr<Network> network, uint32_t group, const Placement& placement,
                   std::vector<int> job_ranks, std::vector<int> global_ranks);

  std::unique_ptr<Exchange> make_exchange(LaneState& lane) override;
  std::unique_ptr<Schedule> make_schedule(const Group& locals, Lane& lane) override;
  std::unique_ptr<MessageRoute> make_route() override;

  void enroll(std::function<void(const Error&)> fail) override;
  void hear_all() override { links_.network->hear_all(); }
  std::optional<Error> check(const Traffic& traffic) override;
  void end(shm::Standing standing, const Error& for_peers, const Traffic& traffic) override;
  bool have_all_left() const override;
  uint64_t blocking_ranks(const Traffic& traffic) const override;

  IoLoop* io_loop() const override { return links_.network.get(); }
  Interhost& interhost() const override { return links_.network->interhost(); }
  const std::vector<int>& job_ranks() const override { return links_.job_ranks; }

  void measure(Communicator& communicator, const std::function<void()>& interrupted) override;
  std::string describe_links() const override;
  uint64_t take_number() override;
  std::shared_ptr<void> expect_group() const override;
  std::unique_ptr<InterhostPart> split(uint64_t number, const Placement& placement, const std::vector<int>& members,
                                       std::vector<int> global_ranks) const override;

 private:
  void choose();
  void hear(int peer, const std::string& message) override;
  void give_up(const Error& error) override { fail_(error); }
  void hear_ended(int member, const Ended& ended);
  std::optional<Error> check_members(const Traffic& traffic);
  void tell_who_is_late(const Traffic& traffic);
  uint64_t absent_here(const Traffic& traffic) const;
  uint64_t members_of(uint64_t locals) const;

  Links links_;
  InterhostExchange* exchanges_[shm::kLanes] = {};  // by lane
  InterhostSchedule* schedule_ = nullptr;
  InterhostRoute* route_ = nullptr;
  std::function<void(const Error&)> fail_;

  bool ended_ = false;
  std::map<int, int> member_of_;  // by rank of the job
  std::map<int, Ended> left_;     // members that left, and what they had completed
  std::map<int, uint64_t> late_;  // for whom members of other hosts wait
  uint64_t told_late_ = 0;
};

}  // namespace syncengine::hosts
