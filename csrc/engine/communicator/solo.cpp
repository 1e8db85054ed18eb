#include "engine/communicator/solo.h"

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <functional>
#include <limits>
#include <list>
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
#include "engine/progress/options.h"
#include "engine/progress/work.h"
#include "kernels/reduce.h"

namespace syncengine {

// Messages of the only rank of a communicator to itself: a send and a receive of one channel and tag meet in the order
// of the calls.
//
// Ownership: owns what is posted. Thread-safety: any thread. Aliasing: see Message. Failure: a failed one stays failed:
// each later call throws the first error.

class SoloMessages {
 public:
  // `rank` in the whole job, for errors.
  SoloMessages(const Options& options, int rank);
  ~SoloMessages();

  // Never blocks. A message that does not fit its counterpart fails everything with Mismatch.
  std::shared_ptr<Work> post(Message message, bool sends);
  // See Communicator.
  void wait(const Work& work, const std::function<void()>& interrupted, std::optional<Duration> at_most);
  // Fails everything if a message is past its deadline; says on stderr which one is late.
  void check_deadline();
  void fail(std::exception_ptr error);  // the first one counts
  void throw_if_failed() const;
  uint64_t messages() const;  // that ended well

 private:
  struct Post {
    Message message;
    bool sends;
    std::shared_ptr<Work> work;
    Clock::time_point since;
  };
  using Posts = std::list<Post>;

  // Under the lock. What they return is dropped without it: a tensor's end may run other code.
  Posts take_all(const std::exception_ptr& error);
  void deliver(const Post& send, const Post& receive);
  std::string what_is_pending() const;

  const Options options_;
  const std::string name_;
  mutable std::mutex mutex_;
  std::condition_variable changed_;
  Posts posts_;  // unmatched
  std::exception_ptr error_;
  Clock::time_point logged_ = {};
  uint64_t messages_ = 0;
};

namespace {

constexpr auto kSlice = std::chrono::milliseconds(50);  // how late Ctrl-C or a deadline may be noticed

std::exception_ptr make_error(ErrorKind kind, const std::string& text) {
  return std::make_exception_ptr(Error(kind, text));
}

}  // namespace

SoloMessages::SoloMessages(const Options& options, int rank) : options_(options), name_(rank_name(rank)) {}

SoloMessages::~SoloMessages() { fail(make_error(ErrorKind::InvalidUsage, "the communicator is gone")); }

std::shared_ptr<Work> SoloMessages::post(Message message, bool sends) {
  const bool any = !sends && message.peer == Message::kAnySource;
  if (!any && message.peer != 0)
    throw Error(ErrorKind::InvalidUsage,
                message.describe() + ": rank " + std::to_string(message.peer) + " is not in 0..0");
  auto work = std::make_shared<Work>();
  Posts done;
  std::lock_guard lock(mutex_);
  if (error_) std::rethrow_exception(error_);
  work->start();
  auto other = std::find_if(posts_.begin(), posts_.end(), [&](const Post& post) {
    return post.sends != sends && post.message.channel == message.channel && post.message.tag == message.tag;
  });
  posts_.push_back({std::move(message), sends, work, Clock::now()});
  if (other == posts_.end()) return work;
  const Post &mine = posts_.back(), &send = sends ? mine : *other, &receive = sends ? *other : mine;
  const size_t sent = send.message.memory.bytes(), wanted = receive.message.memory.bytes();
  if (sent != wanted || send.message.fingerprint != receive.message.fingerprint) {
    done = take_all(make_error(
        ErrorKind::Mismatch,
        name_ + " called " + receive.message.describe() + " for " + std::to_string(wanted) + " bytes where " + name_ +
            " sent " + std::to_string(sent) + " bytes" +
            (send.message.fingerprint != receive.message.fingerprint ? " in another call of a collective" : "") +
            ": both sides must mean the same message"));
    return work;
  }
  deliver(send, receive);
  done.splice(done.end(), posts_, other);
  done.splice(done.end(), posts_, std::prev(posts_.end()));
  return work;
}

void SoloMessages::deliver(const Post& send, const Post& receive) {
  size_t offset = 0;
  for (const Span& span : send.message.memory.spans()) {
    receive.message.memory.copy_from(span.data, offset, span.bytes);
    offset += span.bytes;
  }
  if (receive.message.source) receive.message.source->store(0, std::memory_order_relaxed);  // before `work` ends
  messages_ += 2;
  send.work->finish();
  receive.work->finish();
  changed_.notify_all();
}

void SoloMessages::wait(const Work& work, const std::function<void()>& interrupted, std::optional<Duration> at_most) {
  const auto deadline = at_most ? Deadline::after(*at_most) : Deadline::never();
  while (!work.ended()) {
    {
      std::unique_lock lock(mutex_);
      if (changed_.wait_for(lock, deadline.left(kSlice), [&] { return work.ended(); })) break;
    }
    check_deadline();
    if (deadline.passed() && !work.ended()) {
      std::unique_lock lock(mutex_);
      const std::string text = what_is_pending() + ": wait(timeout=...) gave up";
      lock.unlock();
      fail(make_error(ErrorKind::Timeout, text));
    }
    try {
      if (interrupted) interrupted();
    } catch (const std::exception& error) {
      fail(make_error(ErrorKind::Aborted, name_ + failure_text(error, "a collective")));
      throw;
    }
  }
  work.rethrow_if_failed();
}

void SoloMessages::check_deadline() {
  std::unique_lock lock(mutex_);
  if (posts_.empty()) return;
  const auto since = posts_.front().since;
  const Duration age = Clock::now() - since;
  const std::string text = what_is_pending();
  if (age >= options_.timeout) {
    lock.unlock();
    return fail(make_error(ErrorKind::Timeout, text + ": the timeout is " + seconds_text(options_.timeout) +
                                                   "; no call of this rank has matched it"));
  }
  if (age < options_.log_after || logged_ == since) return;
  logged_ = since;
  lock.unlock();
  std::fputs(("[syncengine] " + text + "\n").c_str(), stderr);
}

std::string SoloMessages::what_is_pending() const {
  if (posts_.empty()) return name_ + " is not done";
  const Post& oldest = posts_.front();
  return name_ + " is not done since " + seconds_text(Clock::now() - oldest.since) + " in " + oldest.message.describe();
}

void SoloMessages::fail(std::exception_ptr error) {
  Posts dropped;
  std::lock_guard lock(mutex_);
  dropped = take_all(error);
}

SoloMessages::Posts SoloMessages::take_all(const std::exception_ptr& error) {
  if (!error_) error_ = error;
  for (const Post& post : posts_) post.work->fail(error_);
  changed_.notify_all();
  return std::exchange(posts_, {});
}

void SoloMessages::throw_if_failed() const {
  std::lock_guard lock(mutex_);
  if (error_) std::rethrow_exception(error_);
}

uint64_t SoloMessages::messages() const {
  std::lock_guard lock(mutex_);
  return messages_;
}

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
  std::shared_ptr<Work> send(Message message) override { return messages_.post(std::move(message), true); }
  std::shared_ptr<Work> receive(Message message) override { return messages_.post(std::move(message), false); }
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
