// A communicator whose members share one host's memory.
#pragma once

#include "engine/communicator/communicator.h"
#include "engine/communicator/submissions.h"
#include "engine/lanes/lane.h"
#include "engine/lanes/schedule.h"
#include "engine/messages/messenger.h"
#include "engine/progress/engine.h"
#include "engine/progress/group.h"

namespace syncengine {

class ShmCommunicator : public Communicator, protected Progressable {
 public:
  enum class Origin { Job, Split };
  // `offsets` of each member's GroupBlock in its arena; `local_ranks` of each member among the engine's arenas.
  ShmCommunicator(std::shared_ptr<Engine> engine, int rank, std::vector<int> global_ranks, std::vector<int> local_ranks,
                  const std::vector<uint64_t>& offsets, Origin origin);
  ~ShmCommunicator() override;

  // The operation that waits longest, and the members that hold it up.
  struct Pending {
    const Lane::Item* item = nullptr;
    uint64_t blocking_ranks = 0;
  };
  // What moves its operations, one of each. Under the progress lock.
  struct Parts {
    std::unique_ptr<Lane> user_lane, scheduled_lane;
    std::unique_ptr<Schedule> schedule;
    std::unique_ptr<Messenger> messenger;

    uint64_t missing(bool all) const;
    Pending oldest() const;
    std::vector<ArenaRange> direct_memory() const;
  };

  int rank() const override { return group_.rank; }
  int size() const override { return group_.size; }
  const std::vector<int>& global_ranks() const override { return group_.global_ranks; }
  const Options& options() const override { return engine_->options(); }

  std::shared_ptr<Work> submit(Operation operation) override;
  void run(Operation operation, const std::function<void()>& interrupted) override;
  std::shared_ptr<Work> send(Message message) override { return post(std::move(message), true); }
  std::shared_ptr<Work> receive(Message message) override { return post(std::move(message), false); }
  std::shared_ptr<Work> announce(std::shared_ptr<const Slots> slots, size_t index, Operation operation) override;
  std::shared_ptr<const Slots> reserve_slots(size_t count, const std::function<std::string()>& describe,
                                             const std::function<void()>& interrupted) override;
  void wait(const std::shared_ptr<Work>& work, const std::function<void()>& interrupted,
            std::optional<Duration> at_most) override;
  void abort(ErrorKind kind, const std::string& text) override;
  void set_last_words(const std::string& text, std::vector<std::shared_ptr<Work>> works) override;
  void throw_if_failed() const override;
  void check_peers() override;
  std::vector<int> dead() override;
  std::shared_ptr<Communicator> split(const std::vector<int>& ranks, const std::function<void()>& interrupted) override;
  std::shared_ptr<void> allocate(size_t bytes) override;
  shm::Pool* gradient_pool() override { return engine_->gradient_pool(); }
  std::map<std::string, uint64_t> counters() const override;
  void close() override;

 protected:  // hosts/interhost_communicator.h reaches over hosts; its group is that of its own host
  using MakeParts = std::function<Parts(const Group& group, const std::function<bool()>& stop, Lane::Trash& trash)>;
  // Is not moved before the engine has it: its constructor's last act.
  ShmCommunicator(std::shared_ptr<Engine> engine, const Group& group, Origin origin, const MakeParts& make_parts);
  static Group make_group(Engine& engine, int rank, std::vector<int> global_ranks, std::vector<int> local_ranks,
                          const std::vector<uint64_t>& offsets);

  // Progressable: under the progress lock.
  bool advance() override;
  uint64_t interest() const override;
  void check_health() override;
  void lose_direct_memory(const Error& cause) override;
  void fail(ErrorKind kind, const std::string& text) override;
  void leave() override;
  DeadlockDetector::Wait wait_of(const Work& work) const override;
  bool has_block(int local_rank, uint64_t offset) const override;
  std::string describe_wait(const Work& work) const override;

  std::shared_ptr<Work> enqueue(Operation operation, std::shared_ptr<const Slots> slots = {}, size_t index = 0);
  std::shared_ptr<Work> post(Message message, bool sends);
  void give_back_block();
  void await_last_works();
  virtual void end(shm::Standing standing, const Error& for_peers, const Error& raised_here);
  void check_members();
  void check_receives_of_any_source();
  virtual bool have_all_others_left() const;
  void check_deadline();
  // "rank 2", "ranks 1, 3": for whom it waits; empty if that is nobody.
  virtual std::string names_of_blocking_ranks(const Pending& pending) const;
  // "rank 0 waits for rank 2 since 5.0 s in all_reduce(...)"; empty if nothing is pending.
  std::string what_is_pending() const;
  uint64_t local_ranks(uint64_t members) const;
  bool any_peer_failed() const;

  // Of split(): what a member offers, and how the members come together. `members`: ranks of this communicator.
  struct Ticket {
    uint64_t offset = 0;   // of this rank's block for the new group
    uint64_t members = 0;  // bit per rank of the parent; 0: stays out
    uint64_t number = 0;   // over hosts: the new communicator's, from its first member
  };
  virtual uint64_t take_number(uint64_t /*members*/) { return 0; }
  // Kept until join() has returned: who was quicker may use the new communicator already.
  virtual std::shared_ptr<void> expect_group() { return nullptr; }
  virtual std::shared_ptr<Communicator> join(const std::vector<int>& members, const std::vector<Ticket>& tickets);

  std::shared_ptr<Engine> engine_;
  Origin origin_;
  Group group_;
  Parts parts_;

  const std::shared_ptr<SlotTable> slots_ = std::make_shared<SlotTable>(shm::kReadySlots);
  Submissions submissions_{engine_->tally()};

  Submissions::Batch taken_;  // progress lock, as the next; reused by advance()
  bool ended_ = false;
  std::string last_words_;
  std::vector<std::shared_ptr<Work>> last_works_;
  Clock::time_point logged_{};  // the operation that the log line was about
};

}  // namespace syncengine
