// What looks after streams that wait for peers, since they can't look after themselves: a thread that turns a death, a
// mismatch or a deadline into the communicator's named error, and then releases every wait of this rank's streams.
//
// Knows no device: words in pinned memory are all that it reads and writes. They are plain stores of streams and
// kernels, so replays of a graph are seen too.
//
// Ownership: keeps the communicator alive; the words must outlive it. Its thread ends with stop() or the destructor.
// Thread-safety: any thread.
// Failure: what it finds fails the communicator, and so all ranks; throw_if_failed() rethrows.
#pragma once

#include <atomic>
#include <condition_variable>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "cuda/control.h"
#include "engine/communicator/communicator.h"

namespace syncengine::cuda {

class Watchdog {
 public:
  // `controls` of each rank. One line on stderr says for whom a stream waits for longer than Options::log_after.
  Watchdog(std::shared_ptr<Communicator> communicator, std::vector<Control*> controls);
  ~Watchdog() { stop(); }

  // What a call with this fingerprint is, for this rank's and its peers' messages. Before the call is queued.
  void publish(uint32_t fingerprint, const std::string& text);

  // A stream that met a mismatch has ended with NaN: from there on this throws, whether or not the thread has looked.
  void throw_if_failed() const;
  bool has_failed() const {
    return failed_.load(std::memory_order_acquire);
  }  // acquire: after the communicator's error

  // Does not release streams any more. Idempotent.
  void stop();

 private:
  struct Stand {  // where the own stream is, as far as words tell
    uint32_t waiting, progress;
    bool operator==(const Stand&) const = default;
  };

  void run();
  void look();
  void check_mismatch();
  void check_wait();
  [[noreturn]] void fail(ErrorKind kind, const std::string& text) const;
  void release();
  std::vector<int> missing() const;
  bool waits_for(int rank, int peer) const;
  void check_peers_of_wait(const std::vector<int>& late, Duration age, const std::string& call) const;
  std::string latest_text(int rank) const;
  std::string names(const std::vector<int>& members) const;
  std::string text_of(int rank, uint32_t fingerprint) const;
  Control& own() const { return *controls_[communicator_->rank()]; }

  std::shared_ptr<Communicator> communicator_;
  std::vector<Control*> controls_;
  std::atomic<bool> failed_{false};

  // The thread's own.
  Stand stand_{};
  Clock::time_point since_;
  bool logged_ = false;

  std::mutex mutex_;
  std::condition_variable stopped_;
  bool stopping_ = false;
  std::thread thread_;  // last: starts when the rest is ready
};

}  // namespace syncengine::cuda
