#include "engine/communicator/communicator.h"

#include <atomic>
#include <exception>
#include <limits>
#include <mutex>

#include "collectives/plan.h"
#include "collectives/runner.h"
#include "kernels/reduce.h"

namespace syncengine {

namespace {

class SoloCommunicator final : public Communicator {
 public:
  SoloCommunicator(const Options& options, int global_rank) : options_(options), ranks_{global_rank} {}

  int rank() const override { return 0; }
  int size() const override { return 1; }
  const std::vector<int>& global_ranks() const override { return ranks_; }
  const Options& options() const override { return options_; }

  std::shared_ptr<Work> submit(Operation operation) override {
    throw_if_failed();
    require_supported(operation);
    ++operations_;
    auto work = std::make_shared<Work>();
    const size_t element = element_size(operation.dtype);
    const double scale = operation.prescale * operation.postscale;  // one of them is 1
    operation.input.for_each(0, block_bytes(operation), [&](std::byte* part, size_t offset, size_t bytes) {
      operation.output.for_each(offset, bytes, [&](std::byte* to, size_t skip, size_t length) {
        const void* from = part + skip;
        void* into = to;
        if (operation.nonfinite) {
          const int rank = 0;
          reduce_noting(operation, 1, offset + skip, {.dtype = operation.dtype, .op = operation.op, .scale = scale},
                        &from, &rank, 1, &into, 1, length / element);
        } else {
          kernels::copy_scaled(operation.dtype, to, from, length / element, scale);
        }
      });
    });
    work->finish();
    return work;
  }
  void run(Operation operation, const std::function<void()>&) override { submit(std::move(operation)); }
  std::shared_ptr<Work> send(Message message) override { refuse_message(message); }
  std::shared_ptr<Work> receive(Message message) override { refuse_message(message); }
  std::shared_ptr<Work> announce(std::shared_ptr<const Slots>, size_t, uint64_t, Operation operation) override {
    return submit(std::move(operation));
  }
  void refuse(const std::shared_ptr<const Slots>&, uint64_t, const std::string&) override { throw_if_failed(); }
  std::shared_ptr<const Slots> reserve_slots(size_t count, const std::function<std::string()>&,
                                             const std::function<void()>&) override {
    throw_if_failed();
    count += Slots::kBehind;
    return slots_->take(slots_->gap(0, count), count);
  }
  void wait(const std::shared_ptr<Work>&, const std::function<void()>&, std::optional<Duration>) override {}

  void abort(ErrorKind kind, const std::string& text) override {
    std::lock_guard lock(mutex_);
    if (!error_) error_ = std::make_exception_ptr(Error(kind, text));
  }
  void throw_if_failed() const override {
    std::lock_guard lock(mutex_);
    if (error_) std::rethrow_exception(error_);
  }
  std::shared_ptr<Communicator> shrink(Duration, const std::function<void()>&, uint64_t) override {
    return shared_from_this();
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
  std::map<std::string, uint64_t> counters() const override { return {{"operations", operations_}}; }
  void close() override { abort(ErrorKind::InvalidUsage, kClosed); }

 private:
  [[noreturn]] static void refuse_message(const Message& message) {
    throw Error(ErrorKind::InvalidUsage,
                message.describe() + ": no other rank is here; what a rank would send to itself, it can copy");
  }

  const Options options_;
  const std::vector<int> ranks_;
  const std::shared_ptr<SlotTable> slots_ = std::make_shared<SlotTable>(std::numeric_limits<uint64_t>::max());
  std::atomic<uint64_t> operations_ = 0;

  mutable std::mutex mutex_;
  std::exception_ptr error_;
};

}  // namespace

std::shared_ptr<Communicator> make_solo_communicator(const Options& options, int global_rank) {
  return std::make_shared<SoloCommunicator>(options, global_rank);
}

}  // namespace syncengine
