// One way by which messages go to some members of a communicator, and come from them. It moves; messenger.h matches.
//
// Members are called by their ranks in the communicator. A sender announces each message by a header, in order; few
// bytes are in the header itself, others stay where they are until the receiver has matched it and fetches them.
//
// Ownership: owns the posts that it was given until they end. Thread-safety: all calls under the engine's progress
// lock. Aliasing: see Message. Failure: advance() throws what can't go on; the caller fails the communicator.
#pragma once

#include <cstddef>
#include <cstdint>
#include <exception>
#include <functional>
#include <vector>

#include "collectives/operation.h"
#include "engine/lanes/lane.h"

namespace syncengine {

// A call of send() or receive() that has not ended.
struct Post {
  Message message;
  bool sends;
  Lane::Item item;  // for waits and errors: work, since when, description, keepalive
};

// What is known of a message that was sent to this rank.
struct MessageHeader {
  uint64_t channel, tag, fingerprint, bytes;
  uint64_t number;     // by which its route fetches it
  bool whole = false;  // `content` is all of it
  std::vector<std::byte> content = {};
};

class MessageRoute {
 public:
  // Who matches headers with receives.
  class Matcher {
   public:
    virtual bool listens() const = 0;              // some receive has no header yet: those that come are wanted
    virtual uint64_t awaited() const = 0;          // members that such a receive can't go on without
    virtual uint64_t perhaps_awaited() const = 0;  // and those that one of any source may come from
    virtual void arrive(int source, MessageHeader header) = 0;  // may call fetch(); throws Mismatch
    virtual void finish(Post& post) = 0;

   protected:
    ~Matcher() = default;
  };

  virtual ~MessageRoute() = default;

  virtual void send(Post post) = 0;
  // `receive` is for this header, and of the same size.
  virtual void fetch(int source, MessageHeader header, Post receive) = 0;
  // Does what can be done without waiting; adds the bytes that were copied. True if anything moved.
  virtual bool advance(Matcher& matcher, size_t& moved_bytes) = 0;

  virtual void visit(const std::function<void(Post&)>& each) = 0;  // those that it has
  virtual void clear() = 0;                                        // drops these, and what it knows of others
  virtual uint64_t interhost_bytes() const { return 0; }           // sent to other hosts
};

}  // namespace syncengine
