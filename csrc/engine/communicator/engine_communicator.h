// A communicator that the engine moves: between the members on this host in their shared memory, and to members on
// other hosts, if there are any, by its interhost part.
#pragma once

#include <atomic>
#include <string>

#include "base/error.h"
#include "engine/communicator/communicator.h"
#include "engine/hosts/interhost_members.h"
#include "engine/hosts/succession.h"
#include "engine/messages/traffic.h"
#include "engine/progress/engine.h"
#include "transport/shm/layout.h"

namespace syncengine {

// The last words of a rank in a communicator, for its peers. Cuts a long text. Once, by the rank that owns
// `end_record`, after it has written `ended`.
inline void write_end_record(shm::EndRecord& end_record, shm::Standing standing, ErrorKind kind,
                             const std::string& text) {
  end_record.kind = static_cast<uint32_t>(kind);
  end_record.text[text.copy(end_record.text, sizeof(end_record.text) - 1)] = '\0';
  end_record.standing.store(static_cast<uint32_t>(standing), std::memory_order_release);  // release: all else
}

class EngineCommunicator final : public Communicator, private Progressable {
 public:
  enum class Origin { Job, Split };
  // `global_ranks` of all members; of those on this host, ascending, `local_ranks` among the engine's arenas, and
  // `offsets` of their GroupBlocks there. `interhost`: null on one host.
  static std::shared_ptr<EngineCommunicator> create(std::shared_ptr<Engine> engine, Placement placement,
                                                    std::vector<int> global_ranks, std::vector<int> local_ranks,
                                                    std::vector<uint64_t> offsets, Origin origin,
                                                    std::unique_ptr<hosts::InterhostMembers> interhost,
                                                    uint64_t trace_id = 0);
  ~EngineCommunicator() override;

  int rank() const override { return placement_.rank; }
  int size() const override { return placement_.size; }
  const std::vector<int>& global_ranks() const override { return global_ranks_; }
  const Options& options() const override { return engine_->options(); }
  bool spans_hosts() const override { return interhost_ != nullptr; }
  std::vector<int> hosts() const override { return placement_.host_of; }
  uint64_t trace_id() const override { return group_.id; }
  bool has_device_transport() const override;
  std::unique_ptr<DeviceTransport> open_device_transport(int device, const std::string& name) override;
  std::string describe_links() const override;

  std::shared_ptr<Work> submit(Operation operation) override;
  void run(Operation operation, const std::function<void()>& interrupted) override;
  std::shared_ptr<Work> send(Message message) override { return post(std::move(message), true); }
  std::shared_ptr<Work> receive(Message message) override { return post(std::move(message), false); }
  std::shared_ptr<Work> announce(std::shared_ptr<const Slots> slots, size_t index, uint64_t step,
                                 Operation operation) override;
  void refuse(const std::shared_ptr<const Slots>& slots, uint64_t step, const std::string& text) override;
  std::shared_ptr<Work> end_refused(std::shared_ptr<const Slots> slots, uint64_t step,
                                    std::shared_ptr<uint8_t> how) override;
  std::shared_ptr<const Slots> reserve_slots(size_t count, const std::function<std::string()>& describe,
                                             const std::function<void()>& interrupted) override;
  void wait(const std::shared_ptr<Work>& work, const std::function<void()>& interrupted,
            std::optional<Duration> at_most) override;
  void abort(ErrorKind kind, const std::string& text) override;
  void throw_if_failed() const override;
  void check_peers() override;
  std::vector<int> dead() override;
  std::shared_ptr<Communicator> split(const std::vector<int>& ranks, const std::function<void()>& interrupted) override;
  std::shared_ptr<Communicator> shrink(Duration patience, const std::function<void()>& interrupted,
                                       uint64_t without) override;
  std::shared_ptr<void> allocate(size_t bytes) override;
  shm::Pool* gradient_pool() override { return engine_->gradient_pool(); }
  std::map<std::string, uint64_t> counters() const override;
  void close() override;
  bool is_closed() const override { return closed_; }

 private:
  EngineCommunicator(std::shared_ptr<Engine> engine, Placement placement, std::vector<int> global_ranks, Group locals,
                     Origin origin, std::unique_ptr<hosts::InterhostMembers> interhost);

  // Progressable: under the progress lock.
  bool advance() override;
  uint64_t interest() const override;
  void check_health() override;
  void lose_direct_memory(const Error& cause) override;
  void fail(ErrorKind kind, const std::string& text) override;
  void leave() override;
  IoLoop* io_loop() override { return io_loop_; }
  DeadlockDetector::Wait wait_of(const Work& work) const override;
  bool has_block(int local_rank, uint64_t offset) const override;
  std::string describe_wait(const Work& work) const override;

  std::shared_ptr<Work> enqueue(Operation operation);
  std::shared_ptr<Work> enqueue(Operation operation, std::shared_ptr<const Slots> slots, uint64_t slot, uint64_t step);
  bool take_calls();
  std::shared_ptr<Work> post(Message message, bool sends);
  // What a member tells the others of its part in a new communicator, for split() and shrink().
  struct Ticket {
    uint64_t offset = 0;   // of this rank's block for the new group
    uint64_t members = 0;  // bit per rank of the parent; 0: stays out
    uint64_t number = 0;   // between hosts: the new communicator's, from its first member
  };
  bool on_other_host(int member) const { return placement_.host_of[member] != placement_.host; }
  std::shared_ptr<Communicator> join(const std::vector<int>& members, const std::vector<Ticket>& tickets,
                                     Origin origin);
  // Of shrink(): who is left. Throws where this rank is not.
  uint64_t await_decision(Duration patience, const std::function<void()>& interrupted, uint64_t without);
  Outlook look_around(uint64_t without);
  void give_back_block();
  void end(shm::Standing standing, const Error& for_peers, const Error& raised_here);
  bool advance_traffic();
  void check_local_members();
  void check_receives_of_any_source();
  bool have_all_others_left() const;
  void check_deadline();
  // "rank 0 waits for rank 2 since 5.0 s in all_reduce(...)"; empty if nothing is pending.
  std::string what_is_pending() const;
  uint64_t local_ranks(uint64_t locals) const;

  const std::shared_ptr<Engine> engine_;
  Origin origin_;  // changed by shrink(), after which nothing is done with it at the same time
  const Placement placement_;
  const std::vector<int> global_ranks_;
  const Group group_;                                         // of the members on this host
  const std::unique_ptr<hosts::InterhostMembers> interhost_;  // null on one host; its traffic refers to it
  IoLoop* const io_loop_;
  Traffic traffic_;

  std::atomic<uint64_t> splits_{0};  // so far; as many on all members
  const std::shared_ptr<SlotTable> slots_ = std::make_shared<SlotTable>(shm::kReadySlots);
  Submissions submissions_{engine_->tally()};

  Submissions::Batch taken_;  // progress lock, as the next; reused by advance()
  bool ended_ = false;
  std::atomic<bool> closed_{false};
  Clock::time_point logged_{};  // the operation that the log line was about
};

}  // namespace syncengine
