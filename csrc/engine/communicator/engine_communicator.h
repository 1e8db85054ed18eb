// A communicator of several ranks. The engine moves its data: among the members on this host through their shared
// memory, and to members on other hosts, if there are any, through its interhost part.
#pragma once

#include <atomic>

#include "engine/communicator/communicator.h"
#include "engine/communicator/membership.h"

namespace syncengine {

class EngineCommunicator final : public Communicator {
 public:
  EngineCommunicator(std::shared_ptr<Engine> engine, Members members, Membership::Origin origin);

  int rank() const override { return members_.placement.rank; }
  int size() const override { return members_.placement.size; }
  const std::vector<int>& global_ranks() const override { return members_.global_ranks; }
  const Options& options() const override { return engine_->options(); }
  bool spans_hosts() const override { return members_.interhost != nullptr; }
  std::vector<int> hosts() const override { return members_.placement.host_of; }
  uint64_t trace_id() const override { return members_.group.id; }
  std::string describe_links() const override { return spans_hosts() ? members_.interhost->describe_links() : ""; }

  std::shared_ptr<Work> submit(Operation operation) override { return begun(enqueue(std::move(operation))); }
  void run(Operation operation, const std::function<void()>& interrupted) override {
    wait(enqueue(std::move(operation)), interrupted, {});
  }
  std::shared_ptr<Work> send(Message message) override { return post(std::move(message), true); }
  std::shared_ptr<Work> receive(Message message) override { return post(std::move(message), false); }
  std::shared_ptr<Work> announce(std::shared_ptr<const Slots> slots, size_t index, uint64_t step,
                                 Operation operation) override;
  void refuse(const std::shared_ptr<const Slots>& slots, uint64_t step, const std::string& text) override;
  std::shared_ptr<const Slots> reserve_slots(size_t count, const std::function<std::string()>& describe,
                                             const std::function<void()>& interrupted) override;
  void wait(const std::shared_ptr<Work>& work, const std::function<void()>& interrupted,
            std::optional<Duration> at_most) override;
  void abort(ErrorKind kind, const std::string& text) override;
  void throw_if_failed() const override;
  void check_peers() override;
  std::vector<int> ended() override;
  std::shared_ptr<Communicator> split(const std::vector<int>& ranks, const std::function<void()>& interrupted) override;
  std::shared_ptr<Communicator> shrink(Duration patience, const std::function<void()>& interrupted,
                                       uint64_t without) override;
  std::shared_ptr<void> allocate(size_t bytes) override;
  shm::Pool* gradient_pool() override { return engine_->gradient_pool(); }
  std::map<std::string, uint64_t> counters() const override;
  void close() override;
  bool is_closed() const override { return membership_.is_closed(); }

 private:
  std::shared_ptr<Work> enqueue(Operation operation);
  std::shared_ptr<Work> post(Message message, bool sends);
  // Lets the engine begin with a call that no thread waits for yet.
  std::shared_ptr<Work> begun(std::shared_ptr<Work> work) {
    engine_->poke(membership_);
    return work;
  }

  const std::shared_ptr<Engine> engine_;
  const Members members_;
  std::atomic<uint64_t> splits_{0};  // splits so far, the same number on all members
  const std::shared_ptr<SlotTable> slots_ = std::make_shared<SlotTable>(shm::kReadySlots);
  Submissions submissions_{engine_->tally()};
  Membership membership_;
};

}  // namespace syncengine
