// The shared memory through which two ranks of a communicator exchange messages.
//
// A sender announces each message by a header, in order. Few bytes are in the header itself; others stay where they are
// until the receiver wants them, so any number of messages may wait in any order. Each word has one writer, as in
// layout.h.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>

namespace syncengine::shm {

inline constexpr int kMailboxes = 64;   // as many as a communicator may have members
inline constexpr size_t kHeaders = 32;  // announced and not yet heard
inline constexpr size_t kInlineBytes = 984;
inline constexpr size_t kFragments = 4;  // staged pieces of a large message
inline constexpr size_t kFragmentBytes = 128 << 10;

struct alignas(64) MessageHeader {
  uint64_t channel, tag, fingerprint, bytes;
  int64_t offset;  // of the message in the sender's arena; -1: in the header, or staged when it is wanted
  std::byte content[kInlineBytes];
};
static_assert(sizeof(MessageHeader) == 1024);

// Written by the sender, one for each receiver.
struct alignas(64) Outbox {
  std::atomic<uint64_t> announced;  // headers written
  std::atomic<uint64_t> staged;     // fragments written
  std::atomic<uint64_t>
      fragments;  // offset of kFragments * kFragmentBytes in the sender's arena; before the first is staged
  MessageHeader headers[kHeaders];
};

// Written by the receiver, one for each sender.
struct alignas(64) Inbox {
  std::atomic<uint64_t> heard;     // headers read
  std::atomic<uint64_t> number;    // of the header that is wanted
  std::atomic<uint64_t> wanted;    // how many were wanted so far, one after the other
  std::atomic<uint64_t> received;  // how many of them have arrived
  std::atomic<uint64_t> emptied;   // fragments read
};

struct Mailboxes {
  Outbox out[kMailboxes];
  Inbox in[kMailboxes];
};

}  // namespace syncengine::shm
