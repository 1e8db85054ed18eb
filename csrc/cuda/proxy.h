// Carries out collectives for a stream on the CPU's engine, between hosts, where devices can't reach each other.
//
// The stream copies a piece of a tensor into pinned memory, posts it, waits for the piece's word and copies the result
// back. A thread submits all posted pieces, in the order of posts, to its own communicator, then awaits the oldest.
//
// The proxy knows no device: it touches only memory and words.
//
// Ownership: keeps both communicators alive until stop(), with which its thread ends; the destructor stops.
// Thread-safety: any thread. post() never blocks for long, and calls nothing that a stream's callback must not.
// Failure: a piece that can't be carried out ends like the others, with ones in all bits for a result, and fails the
// parent.
#pragma once

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

// A part of a collective that is a collective itself, on a slot of pinned memory. All offsets are bytes: `user` of a
// copy counts into the operation's spans, `slot` into the piece's memory. The piece's own input and output lie in that
// memory, too, in place if their offsets are equal.
struct ProxyPiece {
  std::vector<Copy> in, out;  // own memory -> slot before, slot -> own memory after
  size_t input = 0, input_bytes = 0;
  size_t output = 0, output_bytes = 0;
};

// Cuts a collective into pieces that fit a slot and give the same bits: a pure function. Returns at least one piece; an
// operation without bytes is one empty piece. `slot_bytes` is at least 64 for each rank, and 64 more.
std::vector<ProxyPiece> cut(const Operation& operation, int rank, int world, size_t slot_bytes);

class Proxy {
 public:
  // A collective on a slot's memory, which it keeps alive.
  struct Posted {
    Operation operation;
    uint32_t* word;  // becomes kArrived when the result is there; the stream makes it 0 again
    std::shared_ptr<void> memory;
  };

  // `parent` is the communicator that the user knows. If `own` fails, so does the parent, and vice versa.
  Proxy(std::shared_ptr<Communicator> parent, std::shared_ptr<Communicator> own);
  ~Proxy() { stop(); }

  void post(std::shared_ptr<const Posted> posted);

  // Ends the thread, when all that was posted has ended. What is posted later ends at once, as failed. Idempotent.
  void stop();

 private:
  void run();
  template <class Step>
  bool succeeds(Step&& step);
  static void end(const Posted& posted, bool has_result);

  std::shared_ptr<Communicator> parent_, own_;

  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<std::shared_ptr<const Posted>> posted_;
  bool stopping_ = false;
  std::thread thread_;  // last member: starts when the others exist
};

}  // namespace syncengine::cuda
