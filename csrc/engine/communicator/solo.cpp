#include "engine/communicator/solo.h"

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <limits>

#include "collectives/plan.h"
#include "engine/communicator/solo_messages.h"

namespace syncengine {

namespace {

class SoloCommunicator final : public Communicator {
 public:
  SoloCommunicator(const Options& options, int global_rank)
      : options_(options), ranks_{global_rank}, messages_(options, global_rank) {}

  int rank() const override { return 0; }
  int size() const override { return 1; }
  const std::vector<int>& global_ranks() const override { return ranks_; }
  const Options& options() const override { return options_; }

  std::shared_ptr<Work> submit(Operation operation) override {
    throw_if_failed();
    require_supported(operation);
    ++operations_;
    auto work = std::make_shared<Work>();
    size_t block = block_bytes(operation);
    operation.input.for_each(0, block, [&](std::byte* from, size_t offset, size_t bytes) {
      operation.output.for_each(offset, bytes, [&](std::byte* to, size_t skip, size_t length) {
        if (to != from + skip) std::copy_n(from + skip, length, to);
      });
    });
    work->finish();
    return work;
  }
  void run(Operation operation, const std::function<void()>&) override { submit(std::move(operation)); }
  std::shared_ptr<Work> send(Message message) override { return messages_.post(std::move(message), true); }
  std::shared_ptr<Work> receive(Message message) override { return messages_.post(std::move(message), false); }
  std::shared_ptr<Work> announce(std::shared_ptr<const Slots>, size_t, Operation operation) override {
    return submit(std::move(operation));
  }
  std::shared_ptr<const Slots> reserve_slots(size_t count, const std::function<std::string()>&,
                                             const std::function<void()>&) override {
    throw_if_failed();
    return slots_->take(slots_->gap(0, count), count);
  }
  void wait(const std::shared_ptr<Work>& work, const std::function<void()>& interrupted,
            std::optional<Duration> at_most) override {
    messages_.wait(*work, interrupted, at_most);  // collectives have ended
  }

  void abort(ErrorKind kind, const std::string& text) override {
    messages_.fail(std::make_exception_ptr(Error(kind, text)));
  }
  void throw_if_failed() const override { messages_.throw_if_failed(); }
  void check_peers() override {
    messages_.check_deadline();
    throw_if_failed();
  }
  std::shared_ptr<Communicator> split(const std::vector<int>& ranks, const std::function<void()>&) override {
    throw_if_failed();
    if (ranks.empty()) return nullptr;
    if (ranks != std::vector<int>{0}) throw Error(ErrorKind::InvalidUsage, "split: the only rank is 0");
    return make_solo_communicator(options_, ranks_[0]);
  }
  std::shared_ptr<void> allocate(size_t bytes) override {
    throw_if_failed();
    void* memory = std::aligned_alloc(64, (bytes / 64 + 1) * 64);
    if (!memory)
      throw Error(ErrorKind::InvalidUsage, "syncengine.empty: no memory for " + std::to_string(bytes) + " bytes");
    return {memory, &std::free};
  }
  std::map<std::string, uint64_t> counters() const override {
    return {{"operations", operations_}, {"messages", messages_.messages()}};
  }
  void close() override { abort(ErrorKind::InvalidUsage, kClosed); }

 private:
  Options options_;
  std::vector<int> ranks_;
  SoloMessages messages_;  // and the first error
  std::shared_ptr<SlotTable> slots_ = std::make_shared<SlotTable>(std::numeric_limits<uint64_t>::max());
  std::atomic<uint64_t> operations_ = 0;
};

}  // namespace

std::shared_ptr<Communicator> make_solo_communicator(const Options& options, int global_rank) {
  return std::make_shared<SoloCommunicator>(options, global_rank);
}

}  // namespace syncengine
