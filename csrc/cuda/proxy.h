// Collectives that the CPU's engine carries out for a stream, where devices can't reach each other: between hosts.
//
// The stream copies a piece of a tensor into pinned memory, posts it, waits for the piece's word and copies the result
// back. A thread takes what is posted to a communicator of its own, in the order of posts, as many at a time as there
// are.
//
// Knows no device: memory and words are all that it touches.
//
// Ownership: keeps both communicators alive until stop(), with which its thread ends; the destructor stops.
// Thread-safety: any thread. post() never blocks for long, and calls nothing that a stream's callback must not.
// Failure: a piece that can't be carried out ends like the others, with ones in all bits for a result, and fails the
// parent.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "collectives/plan.h"
#include "engine/communicator/communicator.h"

namespace syncengine::cuda {

// A collective cut into smaller ones that fit a slot of pinned memory and give the same bits: pure functions of rank
// and size.
//
// Ownership: none. Thread-safety: reentrant. Failure: none.

// Offsets are bytes; `user` of a copy counts into the operation's spans, `slot` into the piece's memory. Input and
// output lie in that memory too: the collective's own, in place where they are equal.
struct Piece {
  std::vector<Copy> in, out;  // own memory -> slot before, slot -> own memory behind
  size_t input = 0, input_bytes = 0;
  size_t output = 0, output_bytes = 0;
};

// At least one. `slot_bytes`: at least 64 for each rank and 64 more. An operation without bytes is one empty piece.
std::vector<Piece> cut(const Operation& operation, int rank, int world, size_t slot_bytes);

class Proxy {
 public:
  // A collective on a slot's memory. Keeps alive what that needs.
  struct Posted {
    Operation operation;
    uint32_t* word;  // becomes kArrived when the result is there; the stream makes it 0 again
    std::shared_ptr<void> memory;
  };

  // `parent` is whom the user knows: it fails with `own`, and `own` with it.
  Proxy(std::shared_ptr<Communicator> parent, std::shared_ptr<Communicator> own);
  ~Proxy() { stop(); }

  void post(std::shared_ptr<const Posted> posted);

  // Ends what is posted, now and later. Idempotent.
  void stop();

 private:
  struct Started {
    std::shared_ptr<const Posted> posted;
    std::shared_ptr<Work> work;  // null: could not be started
  };

  void run();
  void start(std::shared_ptr<const Posted> posted);
  void finish_oldest();
  template <class Step>
  bool succeeds(Step&& step);
  static void end(const Posted& posted, bool has_result);

  std::shared_ptr<Communicator> parent_, own_;
  std::deque<Started> started_;  // the thread's own

  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<std::shared_ptr<const Posted>> posted_;
  bool stopping_ = false;
  std::thread thread_;  // last: starts when the rest is ready
};

}  // namespace syncengine::cuda
