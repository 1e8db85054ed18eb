// Moves bytes between ranks of different hosts; it never reduces. tcp/ and packets/ (MPI, torch) implement it.
//
// Ownership: the memory of a transfer is the caller's, and stays where it is (when sending, also unchanged) until the
// transfer has ended or withdraw() has returned. Messages are copied. Thread-safety: any thread may call anything but
// run(), which belongs to one thread of the engine, and step(), which one thread at a time may call. Aliasing:
// transfers that run at the same time do not overlap, except for several sends of the same memory, and for a receive
// into memory that is being sent, if the peer sends what is received only after it has got the send. Matching: a send
// and a receive of the same pair and tag are one transfer, in whatever order they were posted; a tag is used again only
// after both sides have ended, and never if it was withdrawn. Large sends stay with the sender until the receive is
// posted and go straight into place. Failure: whatever fails a peer (lost, silent for too long, garbage) fails its
// transfers, now and later, with one Error that names the peer's global rank; other peers are not touched. A peer that
// leaves in order fails once everything that it sent has come; receives that are posted later still get it.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "base/deadline.h"
#include "base/error.h"

namespace syncengine {

class Interhost {
 public:
  // The most bytes of one transfer. Callers cut larger data into several, so that it can be reduced while it arrives,
  // and so that several connections share it.
  static constexpr size_t kMaxTransfer = size_t{1} << 20;
  // The most bytes of a transfer that may be sent before its receive is posted.
  static constexpr size_t kMaxUnasked = size_t{16} << 10;
  static constexpr size_t kMaxMessage = size_t{64} << 10;

  class Transfer {
   public:
    enum class State : uint8_t { Posted, Done, Failed };
    State state() const { return state_.load(std::memory_order_acquire); }  // acquire: the bytes are there after Done
    bool ended() const { return state() != State::Posted; }
    const Error& error() const { return *error_; }  // valid once state() == Failed

    // Implementations of Interhost call these to end the transfer.
    void finish() { state_.store(State::Done, std::memory_order_release); }  // release: the bytes before the state
    void fail(const Error& error) {
      error_ = error;
      state_.store(State::Failed, std::memory_order_release);  // release: the error before the state
    }

   private:
    std::optional<Error> error_;
    std::atomic<State> state_{State::Posted};
  };
  struct Message {
    int peer;
    std::string bytes;
  };

  virtual ~Interhost() = default;

  // Start a transfer with `peer`, a rank of the job that lives on another host. Never block.
  virtual std::shared_ptr<Transfer> send(int peer, uint64_t tag, const std::byte* data, size_t bytes) = 0;
  virtual std::shared_ptr<Transfer> receive(int peer, uint64_t tag, std::byte* data, size_t bytes) = 0;

  // Messages have at most kMaxMessage bytes. They arrive in the order of each peer, and never wait for transfers that
  // have not begun. hear() returns the oldest message that has arrived.
  virtual void tell(int peer, const std::string& message) = 0;
  virtual std::optional<Message> hear() = 0;

  // Returns the error with which `peer`, and so each of its transfers, has failed, or nothing. Once it is reported,
  // hear() can return all messages that came from the peer.
  virtual std::optional<Error> failure(int peer) const = 0;

  // Whether the process of `peer` is known to have ended, or only to have left in order, so that it may connect again.
  // Unknown: neither, as of a peer that may live but can't be reached. knows_ends(): whether all ends are found out.
  enum class End : uint8_t { Unknown, Left, Ended };
  virtual bool knows_ends() const { return false; }
  virtual End end_of(int) const { return End::Unknown; }

  // Ends this side's transfers with tags from `first` to `last`, which are one communicator's: all its members,
  // `peers`, withdraw them at some time. After the return, no byte of the callers' memory is touched. The connections
  // and the transfers with other tags go on: a send that has begun is completed from a copy, and what still arrives for
  // a receive is dropped.
  virtual void withdraw(const std::vector<int>& peers, uint64_t first, uint64_t last, const Error& error) = 0;

  // Moves bytes until stop(), and sleeps while there are none to move. Calls `progressed`, on this thread and without
  // locks, after transfers have ended, a message has arrived or a peer has failed. Implementations in which any thread
  // may move bytes have steps instead.
  virtual void run(const std::function<void()>& progressed) = 0;

  // Makes one turn of run()'s loop. Returns News where run() would call `progressed`, and Over when all is done after
  // stop(). If there is nothing to move, a step sleeps until there is, until wake(), or for `at_most`. Callers make at
  // least one step in each period of heartbeats.
  enum class Step : uint8_t { Quiet, News, Over };
  virtual bool has_steps() const { return false; }
  virtual Step step(Duration) { return Step::Quiet; }
  virtual void wake() {}
  virtual bool has_unsent() const { return false; }  // something was posted that only needs steps here to leave

  // Ends run(), or the steps, after a goodbye: a peer that still needs this rank gets PeerLost with "left", at once.
  virtual void stop() = 0;
};

}  // namespace syncengine
