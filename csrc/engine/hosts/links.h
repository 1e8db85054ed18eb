// Facts that the parts of one communicator over hosts share: who is where, and how to reach them.
//
// Ownership: keeps the network. Thread-safety: constant after construction, except for calls of Network.
#pragma once

#include <cstdint>
#include <cstring>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <type_traits>
#include <vector>

#include "base/checked.h"
#include "base/error.h"
#include "collectives/interhost_plan.h"
#include "engine/hosts/network.h"
#include "engine/hosts/succession.h"
#include "engine/lanes/slots.h"
#include "transport/shm/layout.h"

namespace syncengine::hosts {

// Messages between engines on different hosts. They are plain structs, the same on all hosts: the handshake refuses a
// peer with another version of the library or another byte order.

enum class Kind : uint32_t { Opened, Flags, Ready, Scheduled, Refused, Late, Ended, Announced, Heard, Shrinks };

struct Head {
  uint32_t group;
  Kind kind;
};

// The limits of the numbers in a message. Each kind of message checks its own numbers against them.
struct Limits {
  uint64_t members, hosts;  // a bit for each
  uint64_t slots;           // limit of slots' numbers; see Schedule::expect_slots
};

// Says that the sender has begun operation `number` of a lane.
struct Opened {
  static constexpr Kind kKind = Kind::Opened;
  Head head;
  uint64_t lane, number;
  shm::OpRecord record;  // untrusted, as every record of a peer: see check()
  bool is_sound(const Limits&) const { return lane < shm::kLanes; }
};

// The flags of an operation that any rank of the sender's host has set.
struct Flags {
  static constexpr Kind kKind = Kind::Flags;
  Head head;
  uint64_t lane, number;
  uint64_t words[shm::kFlagWords];
  bool is_sound(const Limits&) const { return lane < shm::kLanes; }
};

// Tells the communicator's first rank that all ranks of the sender's host have announced the slot in this step.
struct Ready {
  static constexpr Kind kKind = Kind::Ready;
  Head head;
  uint64_t slot, step;
  bool is_sound(const Limits& limits) const { return slot < limits.slots; }
};

// Tells the leader of a host which operation runs next. Sent by the communicator's first rank.
struct Scheduled {
  static constexpr Kind kKind = Kind::Scheduled;
  Head head;
  uint64_t slot;
  bool is_sound(const Limits& limits) const { return slot < limits.slots; }
};

// Says that the sender has refused this step of the model whose slots begin at `first_slot`. A bit for each slot of the
// model follows, up to the last one that is set: a slot's bit is set if the sender had announced it in the step.
struct Refused {
  static constexpr Kind kKind = Kind::Refused;
  Head head;
  uint64_t first_slot, step;
  char text[Slots::kTextWords * sizeof(uint64_t)];
  bool is_sound(const Limits& limits) const { return first_slot < limits.slots; }
};

// Tells other hosts for which members of its own host the sender has long waited; 0 once it waits for none any more.
struct Late {
  static constexpr Kind kKind = Kind::Late;
  Head head;
  uint64_t members;
  bool is_sound(const Limits& limits) const { return (members & ~limits.members) == 0; }
};

// Counts the messages with one member that have ended, except short ones, whose content comes with the header.
struct MessageTally {
  uint64_t sent = 0, received = 0;
};

// How the sender has ended, and what it had completed by then: operations of each lane, and messages with the receiver.
struct Ended {
  static constexpr Kind kKind = Kind::Ended;
  Head head;
  uint32_t standing, error;
  uint64_t completed[shm::kLanes];
  MessageTally tally;
  char text[sizeof(shm::EndRecord::text)];
  bool is_sound(const Limits&) const {
    return (standing == static_cast<uint32_t>(shm::Standing::Failed) ||
            standing == static_cast<uint32_t>(shm::Standing::Left)) &&
           error <= static_cast<uint32_t>(kLastErrorKind);
  }
};

// Announces a message to the receiver. Content of at most kShortBytes follows at once; more comes by transfers.
inline constexpr size_t kShortBytes = 16 << 10;
struct Announced {
  static constexpr Kind kKind = Kind::Announced;
  Head head;
  uint64_t channel, tag, fingerprint, bytes;
  uint64_t number;  // counts messages that come by transfers, from 0; else 0
  bool is_sound(const Limits&) const { return true; }
};

// Says how many of the receiver's announcements the sender has taken in so far, which lets the receiver announce more.
struct Heard {
  static constexpr Kind kKind = Kind::Heard;
  Head head;
  uint64_t count;
  bool is_sound(const Limits&) const { return true; }
};

// Tells members on other hosts the verdict of the sender's host in shrink(), once the sender's communicator has ended.
struct Shrinks {
  static constexpr Kind kKind = Kind::Shrinks;
  Head head;
  HostVerdict verdict;
  bool is_sound(const Limits& limits) const {
    return (verdict.members & ~limits.members) == 0 && (verdict.word & ~limits.hosts) == 0;
  }
};

template <class Message>
std::string write(uint32_t group, const Message& content) {
  static_assert(std::is_trivially_copyable_v<Message>);
  Message message = content;
  message.head = {group, Message::kKind};
  return {reinterpret_cast<const char*>(&message), sizeof(message)};
}

// Reads a message from its bytes. Returns nothing if these have another size, or if a number in them is out of bounds.
template <class Message>
std::optional<Checked<Message>> read(std::string_view bytes, const Limits& limits) {
  Message message;
  if (bytes.size() != sizeof(message)) return {};
  std::memcpy(&message, bytes.data(), sizeof(message));
  return Checked<Message>::sound(message, [&](const Message& it) { return it.is_sound(limits); });
}

struct Links {
  Placement placement;
  uint32_t group;                 // number of the communicator, the same on all members
  std::vector<int> job_ranks;     // of each member: its name in the network
  std::vector<int> global_ranks;  // of each member: its name in texts
  std::vector<int> counterparts;  // members
  std::vector<int> remotes;       // members of other hosts
  std::shared_ptr<Network> network;
  InterhostChoice choice;

  std::string name(int member) const { return "rank " + std::to_string(global_ranks[member]); }
  // The end of an error's text, which says in which operation or message this rank was.
  std::string while_in(const std::string& what) const { return " while " + name(placement.rank) + " was in " + what; }
  // The first rank of each host speaks for the host about the order of announced operations.
  int leader(int host) const { return placement.members[host].front(); }
  bool leads_host() const { return leader(placement.host) == placement.rank; }
  bool leads_all() const { return placement.rank == 0; }

  template <class Message>
  void tell(int member, const Message& message) const {
    tell(member, write(group, message));
  }
  void tell(int member, const std::string& message) const {
    network->interhost().tell(job_ranks[member], message);
    network->notify();
  }
  std::shared_ptr<Interhost::Transfer> send(int member, uint64_t tag, const std::byte* data, size_t bytes) const {
    return network->interhost().send(job_ranks[member], tag, data, bytes);
  }
  std::shared_ptr<Interhost::Transfer> receive(int member, uint64_t tag, std::byte* data, size_t bytes) const {
    return network->interhost().receive(job_ranks[member], tag, data, bytes);
  }
};

}  // namespace syncengine::hosts
