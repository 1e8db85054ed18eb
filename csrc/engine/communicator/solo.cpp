#include "engine/communicator/communicator.h"

#include <atomic>
#include <condition_variable>
#include <cstdlib>
#include <functional>
#include <limits>
#include <memory>
#include <mutex>
#include <optional>
#include <string>

#include "base/deadline.h"
#include "base/error.h"
#include "base/texts.h"
#include "collectives/operation.h"
#include "collectives/plan.h"
#include "collectives/runner.h"
#include "engine/lanes/mismatch.h"
#include "engine/messages/traffic.h"
#include "engine/progress/engine.h"
#include "kernels/reduce.h"

namespace syncengine {

namespace {

constexpr auto kSlice = std::chrono::milliseconds(50);  // how late Ctrl-C or a deadline may be noticed

class SoloCommunicator final : public Communicator {
 public:
  SoloCommunicator(const Options& options, int global_rank) : options_(options), ranks_{global_rank} {}
  ~SoloCommunicator() override { abort(ErrorKind::InvalidUsage, "the communicator is gone"); }

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
        if (const auto* nonfinite = operation.nonfinite.get()) {
          const int rank = 0;
          reduce_noting(*nonfinite, 1, nonfinite->locate(offset + skip, length, element),
                        {.dtype = operation.dtype, .op = operation.op, .scale = scale}, &from, &rank, 1, &into, 1,
                        length / element);
        } else {
          kernels::copy_scaled(operation.dtype, to, from, length / element, scale);
        }
      });
    });
    work->finish();
    return work;
  }
  void run(Operation operation, const std::function<void()>&) override { submit(std::move(operation)); }
  std::shared_ptr<Work> send(Message message) override { return post(std::move(message), true); }
  std::shared_ptr<Work> receive(Message message) override { return post(std::move(message), false); }
  std::shared_ptr<Work> announce(std::shared_ptr<const Slots>, size_t, uint64_t, Operation operation) override {
    return submit(std::move(operation));
  }
  void refuse(const std::shared_ptr<const Slots>&, uint64_t, const std::string&) override { throw_if_failed(); }
  std::shared_ptr<Work> end_refused(std::shared_ptr<const Slots>, uint64_t, std::shared_ptr<uint8_t>) override {
    return submit(Operation{.collective = Collective::Barrier});
  }
  std::shared_ptr<const Slots> reserve_slots(size_t count, const std::function<std::string()>&,
                                             const std::function<void()>&) override {
    throw_if_failed();
    count += Slots::kBehind;
    return slots_->take(slots_->gap(0, count), count);
  }
  // For messages: collectives have ended.
  void wait(const std::shared_ptr<Work>& work, const std::function<void()>& interrupted,
            std::optional<Duration> at_most) override {
    const auto deadline = at_most ? Deadline::after(*at_most) : Deadline::never();
    for (std::unique_lock lock(lock_); !work->ended();) {
      if (changed_.wait_for(lock, deadline.left(kSlice), [&] { return work->ended(); })) break;
      check_deadline();
      if (deadline.passed()) fail(ErrorKind::Timeout, what_is_pending() + ": wait(timeout=...) gave up");
      lock.unlock();
      try {
        if (interrupted) interrupted();
      } catch (const std::exception& error) {
        abort(ErrorKind::Aborted, rank_name(ranks_[0]) + failure_text(error, "a collective"));
        throw;
      }
      lock.lock();
    }
    work->rethrow_if_failed();
  }

  void abort(ErrorKind kind, const std::string& text) override {
    std::lock_guard lock(lock_);
    fail(kind, text);
  }
  void throw_if_failed() const override { submissions_.throw_if_ended(); }
  void check_peers() override {
    {
      std::lock_guard lock(lock_);
      check_deadline();
    }
    throw_if_failed();
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
  std::map<std::string, uint64_t> counters() const override {
    std::lock_guard lock(lock_);
    return {{"operations", operations_}, {"messages", messenger_.messages()}};
  }
  void close() override { abort(ErrorKind::InvalidUsage, kClosed); }

 private:
  std::shared_ptr<Work> post(Message message, bool sends) {
    if (message.peer != 0 && (sends || message.peer != Message::kAnySource))
      throw Error(ErrorKind::InvalidUsage,
                  message.describe() + ": rank " + std::to_string(message.peer) + " is not in 0..0");
    auto work = submissions_.add(std::move(message), sends);
    std::lock_guard lock(lock_);
    Submissions::Batch batch;
    submissions_.swap(batch);
    for (Post& post : batch.posts) messenger_.post(std::move(post));
    try {
      messenger_.advance(0);
    } catch (const Error& error) {
      fail(error.kind(), error.what());
    }
    changed_.notify_all();
    return work;
  }

  // The rest is under the lock. The first failure counts.
  void fail(ErrorKind kind, const std::string& text) {
    if (std::exchange(failed_, true)) return;
    const auto error = std::make_exception_ptr(Error(kind, text));
    for (Post& post : submissions_.end(error).posts) messenger_.post(std::move(post));
    messenger_.fail_all(error);
    changed_.notify_all();
  }

  // Fails everything if a message is past its deadline; says on stderr which one is late.
  void check_deadline() {
    const Lane::Item* item = messenger_.oldest();
    if (!item) return;
    const Duration age = Clock::now() - item->since;
    if (age >= options_.timeout)
      return fail(ErrorKind::Timeout, what_is_pending() + ": the timeout is " + seconds_text(options_.timeout) +
                                          "; no call of this rank has matched it");
    if (age < options_.log_after || logged_ == item->since) return;
    logged_ = item->since;
    lock_.log(what_is_pending());
  }

  std::string what_is_pending() const {
    const Lane::Item* item = messenger_.oldest();
    return rank_name(ranks_[0]) + " is not done" +
           (item ? " since " + seconds_text(Clock::now() - item->since) + " in " + describe(item->operation) : "");
  }

  const Options options_;
  const std::vector<int> ranks_;
  const std::shared_ptr<SlotTable> slots_ = std::make_shared<SlotTable>(std::numeric_limits<uint64_t>::max());
  std::atomic<uint64_t> operations_ = 0;

  Work::Tally tally_;
  Submissions submissions_{tally_};
  mutable ProgressLock lock_;  // guards the rest
  std::condition_variable_any changed_;
  Messenger messenger_{0, ranks_, nullptr, nullptr, lock_.trash()};
  bool failed_ = false;
  Clock::time_point logged_ = {};
};

}  // namespace

std::shared_ptr<Communicator> make_solo_communicator(const Options& options, int global_rank) {
  return std::make_shared<SoloCommunicator>(options, global_rank);
}

}  // namespace syncengine
