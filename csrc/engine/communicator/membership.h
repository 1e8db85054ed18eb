// The parts of a communicator on one rank: its Members, and the Membership, which the engine moves until it ends.
#pragma once

#include <atomic>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "engine/hosts/interhost_members.h"
#include "engine/messages/traffic.h"
#include "engine/progress/engine.h"

namespace syncengine {

// Tells the peers in a communicator how and why a rank has ended; a long text is cut. Called by the rank that owns
// `end_record`, after it has written `ended` there. A second call does nothing, since peers may be reading the record.
inline void write_end_record(shm::EndRecord& end_record, shm::Standing standing, ErrorKind kind,
                             const std::string& text) {
  if (end_record.standing.load(std::memory_order_relaxed) != static_cast<uint32_t>(shm::Standing::Member)) return;
  end_record.kind = static_cast<uint32_t>(kind);
  end_record.text[text.copy(end_record.text, sizeof(end_record.text) - 1)] = '\0';
  end_record.standing.store(static_cast<uint32_t>(standing), std::memory_order_release);  // release: everything above
}

// The members of a communicator, and how this rank reaches them.
//
// Ownership, thread-safety: as Group and InterhostMembers.
struct Members {
  Placement placement;
  std::vector<int> global_ranks;                       // of all members
  Group group;                                         // the members on this host
  std::unique_ptr<hosts::InterhostMembers> interhost;  // null on one host

  // `global_ranks` has each member's rank in the job. `local_ranks` has the local ranks of the members on this host,
  // ascending, and `offsets` says where their GroupBlocks lie in their arenas. `interhost` is null on one host.
  static Members make(Engine& engine, Placement placement, std::vector<int> global_ranks, std::vector<int> local_ranks,
                      std::vector<uint64_t> offsets, std::unique_ptr<hosts::InterhostMembers> interhost,
                      uint64_t trace_id = 0);
  // Returns the Members of a new communicator. `chosen` is the mask of its members, with this rank; `offset_of` gives
  // the offset of the new GroupBlock of a member on this host. `number` names the new communicator in messages between
  // hosts, and `splits` counts the splits so far: both are the same on all members.
  Members select(Engine& engine, uint64_t chosen, const std::function<uint64_t(int member)>& offset_of, uint64_t number,
                 uint64_t splits) const;
  std::string name() const { return group.name(group.rank); }  // of this rank, for texts
  bool on_other_host(int member) const { return placement.host_of[member] != placement.host; }
};

// This rank's part in a communicator, as the engine moves it: it takes over the program's calls, makes them progress
// with the other members, watches these, and ends once, by failure or in good order.
//
// Ownership: the communicator's, which owns what it refers to; the destructor leaves. Thread-safety: under the engine's
// progress lock, unless a comment says otherwise. Failure: an error after which it can't go on ends it, on all members;
// then all its works fail, and Submissions throws.
class Membership final : public Progressable {
 public:
  enum class Origin { Job, Split };

  Membership(Engine& engine, const Members& members, Submissions& submissions, Origin origin);
  ~Membership() override;  // called without the lock, like begin()
  void begin();            // called once, when the communicator is complete: no message comes before, and nothing moves

  bool advance() override;
  uint64_t interest() const override { return ended_ ? 0 : renumbered(traffic_.interest(), group_.local_ranks); }
  void check_health() override;
  void lose_direct_memory(const Error& cause) override;
  void fail(ErrorKind kind, const std::string& text) override;
  void leave() override;
  IoLoop* io_loop() override { return io_loop_; }
  DeadlockDetector::Wait wait_of(const Work& work) const override;
  bool has_block(int local_rank, uint64_t offset) const override;
  std::string describe_wait(const Work& work) const override;

  void refuse(const Slots& slots, uint64_t step, const std::string& text);  // see Communicator
  void expect_slots(uint64_t count) { traffic_.schedule().expect_slots(count); }
  // Returns a text such as "rank 0 waits for rank 2 since 5.0 s in all_reduce(...)"; empty if nothing is pending.
  std::string what_is_pending() const;
  const Traffic& traffic() const { return traffic_; }

  // is_closed() and origin() may be called without any lock.
  bool is_closed() const { return closed_; }
  Origin origin() const { return origin_; }
  // Called by shrink(), when no other thread reads the origin. If this was the job's communicator, the new one is from
  // then on: its abort() and close() end all others.
  void hand_on_origin() { origin_ = Origin::Split; }

 private:
  bool take_calls();
  bool advance_traffic();
  void end(shm::Standing standing, const Error& for_peers, const Error& raised_here);
  void check_local_members();
  void check_receives_of_any_source();
  void check_deadline();

  Engine& engine_;
  const Members& members_;
  const Group& group_;  // the members' group
  Submissions& submissions_;
  IoLoop* const io_loop_;
  Origin origin_;
  Traffic traffic_;

  Submissions::Batch taken_;  // reused by advance()
  bool ended_ = false;
  std::atomic<bool> closed_{false};
  Clock::time_point logged_{};  // start of the wait that the last log line was about
};

}  // namespace syncengine
