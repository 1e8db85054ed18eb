#include "engine/communicator/solo_messages.h"

#include <algorithm>
#include <cstdio>

#include "base/error.h"
#include "base/interruption.h"
#include "base/texts.h"

namespace syncengine {

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

}  // namespace syncengine
