// One way for messages to and from some members of a communicator. A route moves messages; messenger.h matches them.
//
// Members are named by their ranks in the communicator. A sender announces each message by a header, in order. Few
// bytes fit into the header itself; others stay where they are until the receiver has matched the header and fetches
// them.
//
// Ownership: owns the posts that it was given until they end. Thread-safety: all calls under the engine's progress
// lock. Aliasing: see Message. Failure: advance() throws errors after which it can't go on; the caller fails the
// communicator.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <vector>

#include "collectives/operation.h"
#include "engine/lanes/lane.h"

namespace syncengine {

// A call of send() or receive() that has not ended.
struct Post {
  Message message;
  bool sends;
  Lane::Item item;  // for waits and errors: work, start of the wait, description, keepalive
};

// The announcement of a message that was sent to this rank.
struct MessageHeader {
  uint64_t channel, tag, fingerprint, bytes;
  uint64_t number;     // with which its route fetches it
  bool whole = false;  // `content` is all of it
  std::vector<std::byte> content = {};
  uint64_t order = 0;  // among all headers that have arrived here
};

class Messenger;

class MessageRoute {
 public:
  virtual ~MessageRoute() = default;

  virtual void send(Post post) = 0;
  // Fetches the message of `header` into `receive`, with which it was matched, and which has the same size.
  virtual void fetch(int source, MessageHeader header, Post receive) = 0;
  // Does what can be done without waiting, and counts the bytes that it copies. Returns whether anything moved.
  virtual bool advance(Messenger& messenger) = 0;

  virtual void visit(const std::function<void(Post&)>& each) = 0;  // calls `each` with every post that it has
  virtual void clear() = 0;                                        // drops its posts, and what it knows of its peers'
  virtual uint64_t interhost_bytes() const { return 0; }           // sent to other hosts
};

}  // namespace syncengine
