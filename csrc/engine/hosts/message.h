// What engines on different hosts tell each other. Plain structs, the same on all hosts: the handshake refuses a peer with
// another version of the library or another byte order.
//
// Failure: read() throws PeerLost where the bytes are no such message.
#pragma once

#include <cstdint>
#include <cstring>
#include <string>
#include <type_traits>

#include "base/error.h"
#include "transport/shm/layout.h"

namespace syncengine::hosts {

enum class Kind : uint32_t { Opened, Flags, Ready, Scheduled, Late, Ended };

struct Head {
  uint32_t group;
  Kind kind;
};

// The sender has begun operation `number` of a lane.
struct Opened {
  static constexpr Kind kKind = Kind::Opened;
  Head head;
  uint64_t lane, number;
  shm::OpRecord record;
};

// What all ranks of the sender's host have set of an operation's flags.
struct Flags {
  static constexpr Kind kKind = Kind::Flags;
  Head head;
  uint64_t lane, number;
  uint64_t words[shm::kFlagWords];
};

// To the leader of the job: all ranks of the sender's host have announced the slot for the `epoch`-th time.
struct Ready {
  static constexpr Kind kKind = Kind::Ready;
  Head head;
  uint64_t slot, epoch;
};

// From the leader of the job to those of the hosts: what runs next.
struct Scheduled {
  static constexpr Kind kKind = Kind::Scheduled;
  Head head;
  uint64_t slot;
};

// For whom the sender waits, once that takes long. Members of the communicator; 0: for nobody any more.
struct Late {
  static constexpr Kind kKind = Kind::Late;
  Head head;
  uint64_t members;
};

// How the sender ended, and how many operations of each lane it has completed.
struct Ended {
  static constexpr Kind kKind = Kind::Ended;
  Head head;
  uint32_t standing, error;
  uint64_t completed[shm::kLanes];
  char text[sizeof(shm::Farewell::text)];
};

template <class Message>
std::string write(uint32_t group, const Message& content) {
  static_assert(std::is_trivially_copyable_v<Message>);
  Message message = content;
  message.head = {group, Message::kKind};
  return {reinterpret_cast<const char*>(&message), sizeof(message)};
}

template <class Message>
Message read(const std::string& bytes) {
  Message message;
  if (bytes.size() != sizeof(message)) throw Error(ErrorKind::PeerLost, "a peer sent a message of a wrong size");
  std::memcpy(&message, bytes.data(), sizeof(message));
  return message;
}

}  // namespace syncengine::hosts
