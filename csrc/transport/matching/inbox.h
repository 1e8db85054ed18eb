// The receiving half of a peer: where the bytes of a frame go. No sockets.
//
// Ownership: as Interhost has it. Thread-safety: under the endpoint's progress lock. Failure: throws what is wrong with
// the peer; nothing that it sends makes this side hold more than kEagerWindow bytes that nobody asked for.
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
  std::byte* data;  // null once it has ended
  uint32_t bytes;
  std::shared_ptr<Interhost::Transfer> transfer;
  uint64_t handle = 0;  // that the peer was told; 0: it comes as Eager
  uint32_t left = 0;    // bytes that are still to come
  uint32_t units = 0;   // a bit for each kChunkUnit that has begun to come

  void fail(const Error& error);
};

// A frame whose payload is being read.
struct Arrival {
  Frame frame;
  std::shared_ptr<Receive> receive;      // whom it is for; or
  std::unique_ptr<std::byte[]> unasked;  // nobody wants it yet; or neither: it goes nowhere

  // Where it goes; null: nowhere.
  std::byte* place() const {
    if (unasked) return unasked.get();
    return receive && receive->data ? receive->data + frame.offset : nullptr;
  }
};

class Inbox {
 public:
  // What came whole before it was asked for.
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

  // An arrival that has begun notices by itself that it has no place any more.
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
  uint32_t held_ = 0;     // of the window: what has come and was not given back
  uint32_t owed_ = 0;     // of it: what may be given back
  std::unordered_map<uint64_t, std::shared_ptr<Receive>> posted_;     // by tag
  std::unordered_map<uint64_t, std::shared_ptr<Receive>> by_handle_;  // those of them that the peer was told
  Unexpecteds unexpected_;
  std::unordered_set<uint64_t> asked_;  // tags
};

}  // namespace syncengine::matching
