// The lock under which an engine's state is touched, held for one bounded pass, and what is put off until it is free:
// dropping what ended operations held, since a tensor's last reference may wait for Python's lock, and writing to
// stderr, which may be a full pipe.
//
// Thread-safety: any thread; trash() and log() by the one that holds it. Failure: none.
#pragma once

#include <atomic>
#include <cstdio>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "base/deadline.h"
#include "base/sync_point.h"

namespace syncengine {

class ProgressLock {
 public:
  using Trash = std::vector<std::shared_ptr<void>>;

  void lock() { mutex_.lock(); }
  bool try_lock() { return mutex_.try_lock(); }
  void unlock() {
    if (trash_.empty() && log_.empty()) return mutex_.unlock();  // after nearly every pass
    Trash trash = std::exchange(trash_, {});
    std::string log = std::exchange(log_, {});
    const bool drops = !trash.empty();
    if (drops) droppers_.fetch_add(1, std::memory_order_relaxed);  // relaxed: under the lock
    mutex_.unlock();
    if (!log.empty()) std::fputs(log.c_str(), stderr);
    if (!drops) return;
    sync_point("dropping");
    trash.clear();
    droppers_.fetch_sub(1, std::memory_order_release);  // release: what it did is done
  }

  Trash& trash() { return trash_; }
  void log(const std::string& line) { log_ += "[syncengine] " + line + "\n"; }

  // Waits, not for ever, for threads that still drop what ended operations held. Before the interpreter ends, which
  // such a drop may need: a thread that asks for Python's lock later is ended, and with it the process. Without that
  // lock.
  void await_drops() const {
    auto deadline = Deadline::after(std::chrono::seconds(5));  // one of them may be the caller: a finalizer
    while (droppers_.load(std::memory_order_acquire) > 0 && !deadline.passed())  // acquire: after what they did
      std::this_thread::sleep_for(std::chrono::microseconds(100));
  }

 private:
  std::mutex mutex_;
  Trash trash_;  // what ended operations held
  std::string log_;
  std::atomic<int> droppers_{0};
};

}  // namespace syncengine
