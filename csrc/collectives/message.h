// What one rank sends to another one, or wants to receive from it.
//
// Ownership: `keepalive` keeps the memory alive until the message has ended, as that of an Operation does.
// Aliasing: nobody else touches the memory meanwhile, but several sends may read the same.
// Matching: a send and a receive of the same channel and tag between two ranks, in the order of the calls on each side.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>

#include "collectives/spans.h"

namespace syncengine {

struct Message {
  static constexpr int kAnySource = -1;

  int peer = 0;  // rank in the communicator; receiving also kAnySource
  uint64_t tag = 0;
  uint64_t channel = 0;      // 0: the program's own messages; others belong to what is made of messages
  uint64_t fingerprint = 0;  // must agree, as must the number of bytes
  SpanList memory = {};
  std::shared_ptr<std::atomic<int>> source = {};  // gets the sender's rank, if given
  std::function<std::string()> describe = {};     // for errors: "recv(...)"; not empty
  std::shared_ptr<void> keepalive = {};
};

}  // namespace syncengine
