// What a communicator asks of its part between hosts, which it has if its members are on several: the traffic with
// those elsewhere, what they tell, and how they end. hosts/interhost_members.h is one.
//
// Ownership: the communicator's, whose Traffic refers to it and ends first. Thread-safety: under the engine's progress
// lock, but where it says otherwise.
#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "base/error.h"
#include "collectives/placement.h"
#include "engine/communicator/communicator.h"
#include "engine/lanes/exchange.h"
#include "engine/lanes/schedule.h"
#include "engine/messages/message_route.h"
#include "engine/progress/io_loop.h"
#include "transport/interhost.h"

namespace syncengine {

class Traffic;

class InterhostPart {
 public:
  virtual ~InterhostPart() = default;

  // Traffic's, of which each is made once; it owns them.
  virtual std::unique_ptr<Exchange> make_exchange(LaneState& lane) = 0;
  virtual std::unique_ptr<Schedule> make_schedule(const Group& locals, Lane& lane) = 0;
  virtual std::unique_ptr<MessageRoute> make_route() = 0;

  // Begins to hear the others, when there is the traffic. `fail` ends the communicator, without a look at what else
  // came.
  virtual void enroll(std::function<void(const Error&)> fail) = 0;
  virtual void hear_all() = 0;
  // What the communicator must fail with; tells the others for whom it waits.
  virtual std::optional<Error> check(const Traffic& traffic) = 0;
  // Tells the others. Nothing that comes from another host touches this rank's memory after it.
  virtual void end(shm::Standing standing, const Error& for_peers, const Traffic& traffic) = 0;

  virtual bool have_all_left() const = 0;
  // Members, here and elsewhere, that hold up what waits longest.
  virtual uint64_t blocking_ranks(const Traffic& traffic) const = 0;

  // Without any lock.
  virtual IoLoop* io_loop() const = 0;
  virtual Interhost& interhost() const = 0;
  virtual const std::vector<int>& job_ranks() const = 0;  // of the members

  // Without the lock, which they take. measure() is collective over `communicator`, its own, and blocks.
  virtual void measure(Communicator& communicator, const std::function<void()>& interrupted) = 0;
  virtual std::string describe_links() const = 0;
  // Of split(): the number of a communicator that this rank, its first member, founds.
  virtual uint64_t take_number() = 0;
  // Kept until there is the new communicator: who was quicker may use it already.
  virtual std::shared_ptr<void> expect_group() const = 0;
  // For a new communicator of these `members`, who are on several hosts. Without any lock. Throws InvalidUsage if its
  // founder had no `number` left.
  virtual std::unique_ptr<InterhostPart> split(uint64_t number, const Placement& placement,
                                               const std::vector<int>& members,
                                               std::vector<int> global_ranks) const = 0;
};

}  // namespace syncengine
