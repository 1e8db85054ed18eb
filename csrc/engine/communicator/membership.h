// The part of a communicator on this rank beneath its calls: its members, and what the engine moves until it ends.
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

// Writes a rank's last words in a communicator, for its peers; a long text is cut. Called once, by the rank that owns
// `end_record`, after it has written `ended`.
inline void write_end_record(shm::EndRecord& end_record, shm::Standing standing, ErrorKind kind,
                             const std::string& text) {
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

  // `global_ranks` has all members. `local_ranks` has the places of the members on this host, ascending, among the
  // engine's arenas, and `offsets` those of their GroupBlocks there. `interhost` is null on one host.
  static Members make(Engine& engine, Placement placement, std::vector<int> global_ranks, std::vector<int> local_ranks,
                      std::vector<uint64_t> offsets, std::unique_ptr<hosts::InterhostMembers> interhost,
                      uint64_t trace_id = 0);
  // The members of a new communicator: `chosen` is their mask, with this rank; `offset_of` gives the offset, as above,
  // of a member on this host. `number` is the new communicator's between hosts, from its first member. `splits` counts
  // the splits so far, alike on all members.
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
  // "rank 0 waits for rank 2 since 5.0 s in all_reduce(...)"; empty if nothing is pending.
  std::string what_is_pending() const;
  const Traffic& traffic() const { return traffic_; }

  // May be called without any lock.
  bool is_closed() const { return closed_; }
  Origin origin() const { return origin_; }
  // Called by shrink(), at a time when nobody else uses the origin: whatever ends the job's communicator then ends the
  // new one, and no longer this one.
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
