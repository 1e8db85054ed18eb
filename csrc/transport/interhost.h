// Moves bytes between ranks of different hosts. tcp, mpi and torch implement it; it never reduces.
//
// Ownership: the memory of a transfer is the caller's, stays where it is and (sending) as it is until the transfer has
// ended or withdraw() has returned. Messages are copied. Thread-safety: any thread may call anything but run(), which
// belongs to one thread of the engine, and step(), which one thread at a time may call. Aliasing: transfers that run at
// the same time do not overlap, but for several sends of one memory, and for a receive of what the peer sends only
// after it has got the send. Matching: a send and a receive of the same pair and tag are one transfer, in whatever
// order they were posted; a tag is used again only after both sides ended, and never if it was withdrawn. Big sends
// stay at home until the receive is posted and go straight into place. Failure: what fails a peer (lost, silent for too
// long, garbage) fails its transfers, now and later, with one Error that names the peer's global rank; other peers are
// not touched. A peer that leaves in order is failed when all has come that it sent; of that, what nobody has asked for
// yet can still be received.
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
  // One piece of data on its way. What is bigger than kMaxTransfer the caller cuts, so that it may be reduced while it
  // arrives, and so that several connections share it.
  static constexpr size_t kMaxTransfer = size_t{1} << 20;
  // What is at most that big is sent whether or not its receive is posted.
  static constexpr size_t kMaxUnasked = size_t{16} << 10;
  static constexpr size_t kMaxMessage = size_t{64} << 10;

  class Transfer {
   public:
    enum class State : uint8_t { Posted, Done, Failed };
    State state() const { return state_.load(std::memory_order_acquire); }  // acquire: the bytes are there after Done
    bool ended() const { return state() != State::Posted; }
    const Error& error() const { return *error_; }  // valid once state() == Failed

    // For implementations.
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

  // `peer` is a rank of the job that lives on another host. Never block.
  virtual std::shared_ptr<Transfer> send(int peer, uint64_t tag, const std::byte* data, size_t bytes) = 0;
  virtual std::shared_ptr<Transfer> receive(int peer, uint64_t tag, std::byte* data, size_t bytes) = 0;

  // Messages of at most kMaxMessage: in order per peer, never behind transfers. `hear` gives the oldest that arrived.
  virtual void tell(int peer, const std::string& message) = 0;
  virtual std::optional<Message> hear() = 0;

  // What is known to be wrong with `peer`: never before hear() has all that came from it, and its transfers fail with
  // it.
  virtual std::optional<Error> failure(int peer) const = 0;

  // Whether the peer's process is known to have ended, or to have left in order; it may have failed otherwise, because
  // it can't be reached. Only where such things are known.
  virtual bool knows_ends() const { return false; }
  virtual bool has_ended(int) const { return false; }

  // Ends the transfers under way with tags first .. last (one communicator's, with `peers` as its members; all of them
  // will do the same, some time), here only: no byte of the callers' memory is touched after it returned. The peer
  // stays well, and so do transfers of other tags: what was half sent goes on from a copy, what has half arrived goes
  // nowhere.
  virtual void withdraw(const std::vector<int>& peers, uint64_t first, uint64_t last, const Error& error) = 0;

  // Moves bytes until stop(): sleeps when there is nothing to move. `progressed` is called, on this thread and without
  // locks, after transfers ended, a message arrived or a peer failed.
  virtual void run(const std::function<void()>& progressed) = 0;

  // Where any thread may move bytes: what run() does again and again. News: `progressed` would be called; Over: after
  // stop(), all is done. A step that finds nothing to move sleeps until there is, wake() or `at_most`. At least one a
  // heartbeat is due.
  enum class Step : uint8_t { Quiet, News, Over };
  virtual bool has_steps() const { return false; }
  virtual Step step(Duration) { return Step::Quiet; }
  virtual void wake() {}
  virtual bool has_unsent() const { return false; }  // something was posted that only needs steps here to leave

  // Says goodbye first: a peer that still needs this rank gets PeerLost with "left", at once.
  virtual void stop() = 0;
};

}  // namespace syncengine
