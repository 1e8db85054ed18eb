// The sending half of a session with a peer: decides which bytes may go, and in which frames. Knows no sockets.
//
// Ownership: as in Interhost: the data is the caller's until its transfer ends. Thread-safety: under the endpoint's
// progress lock. Failure: throws what is wrong with the peer.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <string>
#include <unordered_map>

#include "transport/matching/frame.h"
#include "transport/matching/shared.h"

namespace syncengine::matching {

struct Send {
  uint64_t tag;
  const std::byte* data;
  uint32_t bytes;
  std::shared_ptr<Interhost::Transfer> transfer;  // none once it was withdrawn
  uint64_t handle = 0;                // handle of the peer's receive; 0 as long as none is known, and for Eager
  uint32_t given = 0;                 // bytes given to connections
  uint32_t left = 0;                  // bytes that the kernel has not taken
  std::unique_ptr<std::byte[]> copy;  // copy of the data, if the transfer was withdrawn half-way

  void fail(const Error& error);
  // Gives the caller's memory back: what is still to be sent then comes from a copy.
  void detach(const Error& error);
};

// A frame to be written, with its payload.
struct OutgoingPiece {
  Frame frame;
  std::shared_ptr<Send> send;
  const std::byte* payload() const { return send->data + frame.offset; }
};

class Outbox {
 public:
  // Appends frames for the control connection to `control`.
  Outbox(Shared& shared, int peer, std::string& control, const Withdrawals& withdrawals)
      : shared_(shared), peer_(peer), control_(control), withdrawals_(withdrawals) {}

  void post(uint64_t tag, const std::byte* data, size_t bytes, std::shared_ptr<Interhost::Transfer> transfer);
  void on_ready(const Frame& frame);
  void on_credit(const Frame& frame);

  bool has_next() const { return !queue_.empty(); }
  OutgoingPiece next(uint32_t most = kChunkBytes);  // `most`: bytes of a chunk, a multiple of kChunkUnit
  void written(const OutgoingPiece& piece);

  // Ends the sends of these tags, and tells the peer. Pieces that next() has returned are left to their holder, who
  // must detach or fail their sends.
  void withdraw(uint64_t first, uint64_t last, const Error& error);
  void fail(const Error& error);
  void fail_unready(const Error& error);  // sends that the peer has not asked for

 private:
  struct PeerReady {
    uint64_t handle;
    uint32_t size;
  };

  void enqueue(const std::shared_ptr<Send>& send, const PeerReady& ready);

  Shared& shared_;
  int peer_;
  std::string& control_;
  const Withdrawals& withdrawals_;
  uint32_t eagers_ = 0;  // given to connections
  uint32_t credit_ = kEagerWindow;
  std::deque<std::shared_ptr<Send>> queue_;                      // may be sent; the first may be half sent
  std::unordered_map<uint64_t, std::shared_ptr<Send>> unready_;  // by tag: waits for the peer's Ready
  std::unordered_map<uint64_t, PeerReady> ready_;                // by tag: the peer's Ready, which waits for a send
};

}  // namespace syncengine::matching
