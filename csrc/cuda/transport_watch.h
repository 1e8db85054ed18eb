// Watches the stream of a TransportGroup: from it no wait for a peer that does not come may be for ever.
//
// The words are plain stores of this rank's stream and kernels into pinned memory, so replays of a graph are seen too.
//
// Ownership: keeps the communicator; `words` must outlive it. `release` is called once, on the own thread, after
// `aborted` was set; `go` is set after that.
// Thread-safety: any thread. Failure: it finds the communicator's, and fails it with Mismatch or Timeout.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "base/texts.h"
#include "engine/communicator/communicator.h"

namespace syncengine::cuda {

struct TransportWords {
  alignas(64) uint32_t waiting;  // fingerprint of the collective in which the stream is; 0: none. Written by the stream
  uint32_t progress;             // kernels so far that looked at peers' fingerprints. Written by them
  uint32_t mismatch[3];          // as in Control
  alignas(64) uint32_t go;       // kArrived: all ranks mean the same, and data may move. Written by the own stream and
                                 // kernels; after a failure by the watch
  alignas(64) uint32_t aborted;  // 1: kernels write no results any more. Written by the watch
};

class TransportWatch {
 public:
  TransportWatch(std::shared_ptr<Communicator> communicator, TransportWords* words, std::function<void()> release);
  ~TransportWatch() { stop(); }

  // What a call with this fingerprint is, for messages. Before the call is queued.
  void publish(uint32_t fingerprint, std::string text);

  // Does not release the stream any more. Idempotent.
  void stop();

 private:
  void run();
  void look();
  void check_mismatch();
  void check_wait();
  [[noreturn]] void fail(ErrorKind kind, const std::string& text);
  std::string name(int rank) const { return rank_name(communicator_->global_ranks()[rank]); }
  std::string text_of(uint32_t fingerprint);

  std::shared_ptr<Communicator> communicator_;
  TransportWords* words_;
  std::function<void()> release_;

  // The thread's own.
  std::pair<uint32_t, uint32_t> stand_{};  // waiting, progress
  Clock::time_point since_;
  bool logged_ = false;

  std::mutex mutex_;
  std::vector<std::pair<uint32_t, std::string>> texts_;  // of the latest calls that differ
  std::condition_variable stopped_;
  bool stopping_ = false;
  std::thread thread_;  // last: starts when the rest is ready
};

}  // namespace syncengine::cuda
