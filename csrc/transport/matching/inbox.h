// The receiving half of a session with a peer: decides where the bytes of each frame go. Knows no sockets.
//
// Ownership: as in Interhost. Thread-safety: under the endpoint's progress lock. Failure: throws what is wrong with the
// peer; whatever the peer sends, this side never holds more than kEagerWindow bytes that nobody asked for.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <unordered_map>
#include <unordered_set>

#include "transport/matching/frame.h"
#include "transport/matching/shared.h"

namespace syncengine::matching {

struct Receive {
  uint64_t tag;
  std::byte* data;
  uint32_t bytes;
  std::shared_ptr<Interhost::Transfer> transfer;  // none once it has ended
  uint64_t handle = 0;                            // the handle that the peer was told; 0: the data comes as Eager
  uint32_t left = 0;                              // bytes that are still to come
  uint32_t units = 0;                             // a bit for each kChunkUnit that has begun to come

  void fail(const Error& error);
};

// A frame whose payload is being read.
struct Arrival {
  Frame frame;
  std::shared_ptr<Receive> receive;      // the receive that it is for, or
  std::unique_ptr<std::byte[]> unasked;  // memory, if nobody wants it yet; if neither, the payload is dropped

  // The address where the payload goes; null if it is dropped.
  std::byte* place() const {
    if (unasked) return unasked.get();
    return receive && receive->transfer ? receive->data + frame.offset : nullptr;
  }
};

class Inbox {
 public:
  // A transfer that has arrived completely before its receive was posted.
  struct Unexpected {
    std::unique_ptr<std::byte[]> bytes;
    uint32_t size;
  };
  using Unexpecteds = std::unordered_map<uint64_t, Unexpected>;  // by tag

  Inbox(Shared& shared, int peer, std::string& control, Withdrawals& withdrawals)
      : shared_(shared), peer_(peer), control_(control), withdrawals_(withdrawals) {}

  void post(uint64_t tag, std::byte* data, size_t bytes, std::shared_ptr<Interhost::Transfer> transfer);
  void on_ask(const Frame& frame);

  Arrival begin(const Frame& frame);  // an Eager or Chunk
  void end(Arrival& arrival);         // its payload is in place

  // Ends the receives of these tags. A frame that is being read for one of them has no place any more, and is dropped.
  void withdraw(uint64_t first, uint64_t last, const Error& error);
  void fail(const Error& error);
  Unexpecteds take_unexpected() { return std::move(unexpected_); }

 private:
  void get_ready(const std::shared_ptr<Receive>& receive);
  void finish(Receive& receive);
  void take(const std::shared_ptr<Receive>& receive, const Unexpected& unexpected);
  void give_credit(uint32_t bytes);

  Shared& shared_;
  int peer_;
  std::string& control_;
  Withdrawals& withdrawals_;
  uint64_t handles_ = 0;  // given so far
  uint32_t held_ = 0;     // bytes of the window whose credit has not been given back
  uint32_t owed_ = 0;     // those of them whose credit may be given back
  std::unordered_map<uint64_t, std::shared_ptr<Receive>> posted_;     // by tag
  std::unordered_map<uint64_t, std::shared_ptr<Receive>> by_handle_;  // of these, the ones whose handle the peer knows
  Unexpecteds unexpected_;
  std::unordered_set<uint64_t> asked_;  // tags for which the peer has sent Ask
};

}  // namespace syncengine::matching
