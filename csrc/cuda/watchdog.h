// Watches streams that wait for peers, since a stream can raise no error: a thread turns a death, a mismatch or a
// deadline into the communicator's error, and then releases every wait of this rank's streams.
//
// The watchdog knows no device: it reads and writes only words in pinned memory. Streams and kernels store them
// plainly, so replays of a graph are seen, too.
//
// Ownership: keeps the communicator alive; the words must outlive it. Its thread ends with stop() or the destructor.
// Thread-safety: any thread. Failure: what it finds fails the communicator, and so all ranks; throw_if_failed()
// rethrows.
#pragma once

#include <atomic>
#include <condition_variable>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "base/texts.h"
#include "cuda/control.h"
#include "engine/communicator/communicator.h"

namespace syncengine::cuda {

class Watchdog {
 public:
  // `controls` has each rank's words. If a stream waits for longer than `log_after`, one line on stderr says for whom.
  Watchdog(std::shared_ptr<Communicator> communicator, std::vector<Control*> controls);
  ~Watchdog() { stop(); }

  // Publishes the text of a call, which is queued next, for the errors of this rank and its peers.
  void publish(uint32_t fingerprint, const std::string& text);

  // Throws the communicator's error, if any. If a stream has met a mismatch (and made NaN), waits for the error first.
  void throw_if_failed() const;
  bool has_failed() const { return failed_.load(std::memory_order_acquire); }  // acquire: the communicator's error

  // Ends the thread, so that no stream is released any more. Idempotent.
  void stop();

 private:
  void run();
  void look();
  void check_mismatch();
  void check_wait();
  [[noreturn]] void fail(ErrorKind kind, const std::string& text) const;
  bool waits_for(int rank, int peer) const;
  std::string latest_text(int rank) const;
  std::string text_of(int rank, uint32_t fingerprint) const;
  Control& own() const { return *controls_[communicator_->rank()]; }

  std::shared_ptr<Communicator> communicator_;
  std::vector<Control*> controls_;
  const RankNames names_;
  std::atomic<bool> failed_{false};

  // Used by the thread alone.
  std::pair<uint32_t, uint32_t> stand_;  // where the own stream is: what it waits for, its progress
  Clock::time_point since_;
  bool logged_ = false;

  std::mutex mutex_;
  std::condition_variable stopped_;
  bool stopping_ = false;
  std::thread thread_;  // last member: starts when the others exist
};

}  // namespace syncengine::cuda
