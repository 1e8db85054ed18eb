#include "cuda/transport_watch.h"

#include <algorithm>
#include <cstdio>

#include "base/thread.h"
#include "cuda/control.h"

namespace syncengine::cuda {

namespace {

constexpr auto kEvery = std::chrono::milliseconds(5);  // as the watchdog of one host
constexpr auto kLetGo = std::chrono::microseconds(200);
constexpr size_t kTexts = 32;

}  // namespace

TransportWatch::TransportWatch(std::shared_ptr<Communicator> communicator, TransportWords* words,
                               std::function<void()> release)
    : communicator_(std::move(communicator)),
      words_(words),
      release_(std::move(release)),
      since_(Clock::now()),
      thread_([this] { run(); }) {}

void TransportWatch::stop() {
  {
    std::lock_guard lock(mutex_);
    stopping_ = true;
  }
  stopped_.notify_one();
  if (thread_.joinable()) thread_.join();
}

void TransportWatch::publish(uint32_t fingerprint, std::string text) {
  std::lock_guard lock(mutex_);
  std::erase_if(texts_, [&](const auto& entry) { return entry.first == fingerprint; });
  if (texts_.size() == kTexts) texts_.erase(texts_.begin());
  texts_.emplace_back(fingerprint, std::move(text));
}

void TransportWatch::run() {
  begin_thread("syncengine-cuda");
  bool failed = false;
  std::unique_lock lock(mutex_);
  while (!stopping_) {
    lock.unlock();
    try {
      if (!failed) look();
    } catch (...) {  // the communicator has failed, and has the error
      failed = true;
      store(words_->aborted, 1);  // first: what the stream finds after release() is no result
      release_();
    }
    if (failed) store(words_->go, kArrived);  // again and again: each collective that is queued takes it back
    lock.lock();
    stopped_.wait_for(lock, failed ? Duration(kLetGo) : Duration(kEvery), [this] { return stopping_; });
  }
}

void TransportWatch::look() {
  communicator_->check_peers();
  check_mismatch();
  check_wait();
}

void TransportWatch::check_mismatch() {
  const uint32_t found = load(words_->mismatch[0]);
  if (found == 0) return;
  fail(ErrorKind::Mismatch, name(communicator_->rank()) + " called " + text_of(load(words_->mismatch[2])) + ", " +
                                name(static_cast<int>(found) - 1) +
                                " something else: all ranks must make the same calls in the same order");
}

void TransportWatch::check_wait() {
  const std::pair now{load(words_->waiting), load(words_->progress)};
  if (now.first == 0 || now != stand_) {
    stand_ = now;
    since_ = Clock::now();
    logged_ = false;
    return;
  }
  const Duration age = Clock::now() - since_;
  if (age < std::min(communicator_->options().log_after, communicator_->timeout())) return;
  const std::string text =
      name(communicator_->rank()) + " waits for other ranks since " + seconds_text(age) + " in " + text_of(now.first);
  if (age >= communicator_->timeout())
    fail(ErrorKind::Timeout, text + ": a CUDA stream gave up after the timeout; look at what the other ranks do");
  if (!logged_) std::fprintf(stderr, "syncengine: %s (CUDA stream)\n", text.c_str());
  logged_ = true;
}

void TransportWatch::fail(ErrorKind kind, const std::string& text) {
  communicator_->abort(kind, text);
  throw Error(kind, text);
}

std::string TransportWatch::text_of(uint32_t fingerprint) {
  std::lock_guard lock(mutex_);
  for (const auto& [known, text] : texts_)
    if (known == fingerprint) return text;
  return "something else";
}

}  // namespace syncengine::cuda
