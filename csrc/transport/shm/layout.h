// The layout of one rank's shared memory: what lies where in its arena, and who may write it.
//
// The arena's owner alone writes everything here, with three exceptions. Any rank of the host writes Doorbell::rings,
// GroupBlock::gone, SuccessionWords::members and SuccessionWords::word. During an all-reduce, the rank that reduces a
// slice writes into other ranks' staging slots, or into tensors in their arenas. A watcher locks its mutex of
// ArenaHeader::alive. Counters never reset, so a reader can never mistake an old round for a new one. Fresh pages of a
// memfd are zero, which is the valid first state of everything here but the header's `magic` and `alive`.
#pragma once

#include <pthread.h>

#include <atomic>
#include <cstddef>
#include <cstdint>

#include "transport/shm/pages.h"

namespace syncengine::shm {

// The most ranks of a job, and so of a communicator and of a host. Each rank of a host has a bit in Doorbell::interest.
inline constexpr int kMaxLocalRanks = 64;

// Shared memory through which two ranks of a communicator exchange messages.
//
// A sender announces each message by a header, in order. A few bytes of content fit into the header; more stay in the
// sender's memory until the receiver wants them staged, so any number of messages may wait, and be received in any
// order. Each word of a mailbox has one writer.

inline constexpr size_t kHeaders = 32;  // announced and not yet heard
inline constexpr size_t kInlineBytes = 992;
inline constexpr size_t kFragments = 4;  // staged pieces of a large message
inline constexpr size_t kFragmentBytes = 128 << 10;

struct alignas(64) MailboxHeader {
  uint64_t channel, tag, fingerprint, bytes;
  std::byte content[kInlineBytes];
};
static_assert(sizeof(MailboxHeader) == 1024);

// The sender's words of a mailbox, one for each receiver.
struct alignas(64) OutboxWords {
  std::atomic<uint64_t> announced;  // headers written
  std::atomic<uint64_t> staged;     // fragments written
  std::atomic<uint64_t> fragments;  // offset of kFragments * kFragmentBytes in the sender's arena; before `staged`
  MailboxHeader headers[kHeaders];
};

// The receiver's words of a mailbox, one for each sender.
struct alignas(64) InboxWords {
  std::atomic<uint64_t> heard;    // headers read
  std::atomic<uint64_t> number;   // number of the header that is wanted
  std::atomic<uint64_t> wanted;   // headers wanted so far, one after the other
  std::atomic<uint64_t> emptied;  // fragments read
};

struct Mailboxes {
  OutboxWords out[kMaxLocalRanks];
  InboxWords in[kMaxLocalRanks];
};

inline constexpr size_t kRecords = 64;           // operations in flight per lane
inline constexpr size_t kSlots = 4;              // staging slots per lane
inline constexpr size_t kSlotBytes = 256 << 10;  // four, and the data that they stage, fit a core's share of the cache
inline constexpr size_t kBoardWaits = 15;        // sleeping threads of a rank that are visible to its peers
inline constexpr size_t kLogEntries = 1024;      // scheduled and not yet opened by every rank
inline constexpr size_t kReadySlots = 1 << 20;   // announcement slots per communicator; sparse
inline constexpr size_t kMaxSpans = 512;         // of an operation on the direct path
inline constexpr size_t kFlagWords = 64;         // of an operation, at most
inline constexpr int kUserLane = 0;              // matched by order of submission
inline constexpr int kScheduledLane = 1;         // announced in any order, run in the order of the schedule
inline constexpr int kLanes = 2;
inline constexpr int kMessages = 2;  // no lane: messages between two ranks

static_assert(std::atomic<uint64_t>::is_always_lock_free && std::atomic<uint32_t>::is_always_lock_free);

// The futex on which a rank's threads sleep. A peer rings after publishing something, if its bit is in `interest`.
struct alignas(64) Doorbell {
  std::atomic<uint32_t> rings;     // futex word
  std::atomic<uint64_t> interest;  // peers (by local rank) whose next step a sleeping thread needs
};

// A rank's progress in one lane. `called`, `opened` and `compared` count operations, the others count chunks.
struct alignas(64) LaneProgress {
  std::atomic<uint64_t> called;    // user lane: calls made, of which only so many are open
  std::atomic<uint64_t> opened;    // its OpRecord is published
  std::atomic<uint64_t> staged;    // its contribution is readable
  std::atomic<uint64_t> reduced;   // its slice of the result is readable
  std::atomic<uint64_t> pulled;    // it reads nobody's memory for this chunk any more
  std::atomic<uint64_t> compared;  // it needs nobody's OpRecord any more; in steps of kRecords / 4
};

// A rank's description of an operation, which is compared with every peer's before any of its bytes is used.
struct alignas(64) OpRecord {
  uint64_t key;    // announcement slot, or ~0
  uint64_t bytes;  // of the operation's block
  uint64_t layout_hash;
  // Describes the input's spans, whose offsets in the owner's arena are in LaneBlock::span_offsets: 1 for a single
  // span, else a hash of their number and lengths. -1 if the input lies in ordinary memory.
  int64_t spans;
  double prescale, postscale;
  int32_t root;
  uint8_t collective, dtype, op, numerics;
  uint64_t flag_words;  // at LaneBlock::flags
};
static_assert(sizeof(OpRecord) == 64);

enum class Standing : uint32_t { Member, Failed, Left };

// How a rank has ended. The text is complete before `standing` changes.
struct alignas(64) EndRecord {
  std::atomic<uint32_t> standing;
  uint32_t kind;
  uint64_t ended[kLanes];  // operations of each lane that it had ended by then
  char text[1064];
};
static_assert(sizeof(EndRecord) == 1088);

struct LaneBlock {
  LaneProgress progress;
  OpRecord records[kRecords];
  alignas(kSmallestPage) int64_t span_offsets[kRecords][kMaxSpans];
  alignas(kSmallestPage) uint64_t flags[kRecords][kFlagWords];  // sparse
  // 1 if this rank has noted a value that is not finite. Valid for the chunks that LaneProgress::reduced counts.
  std::atomic<uint64_t> noted[kRecords];
};

// The order in which announced operations run. On each host its first member alone writes it, into its own block.
struct ScheduleLog {
  alignas(64) std::atomic<uint64_t> length;
  alignas(64) uint64_t slots[kLogEntries];
};

// Words with which the members of a failed communicator agree on its successor (engine/hosts/succession.h).
struct alignas(64) SuccessionWords {
  // Where this rank's block in the next communicator lies, as soon as the rank takes part in the shrink; kNeverComes
  // when it never will. Written once.
  std::atomic<uint64_t> arrived;
  // This host's decisions so far (HostVerdict). Any of its members writes them, into the block of its first member.
  std::atomic<uint64_t> members, word;
};
inline constexpr uint64_t kNeverComes = 1;  // no valid offset of a block

// The part of one member's arena that belongs to one communicator.
struct GroupBlock {
  EndRecord end_record;
  SuccessionWords succession;
  alignas(64) std::atomic<uint64_t> gone;      // members that will touch this block no more
  alignas(64) std::atomic<uint64_t> refusals;  // how many steps this rank has refused
  std::atomic<uint64_t> refusal;  // where in `announced` the last reason is, until that step has ended: or 0
  LaneBlock lanes[kLanes];
  ScheduleLog schedule;
  alignas(kSmallestPage) std::atomic<uint64_t> announced[kReadySlots];  // numbers of steps, see Slots
  alignas(kSmallestPage) Mailboxes messages;
  alignas(kSmallestPage) std::byte staging[kLanes][kSlots][kSlotBytes];
};

// The operation that a sleeping thread waits for.
struct Waiting {
  std::atomic<uint64_t> group;  // offset of the communicator's block in this arena
  std::atomic<uint64_t> lane;
  std::atomic<uint64_t> number;   // user lane: number of the operation; scheduled lane: announcement slot
  std::atomic<uint64_t> missing;  // local ranks that have not made this call
};

// The operations that all sleeping threads of a rank wait for, so that peers can see that nobody can go on.
struct alignas(64) WaitBoard {
  std::atomic<uint64_t> version;    // changes with everything below except `looks`; odd during a change
  std::atomic<uint64_t> looks;      // how often the owner has confirmed what is written here
  std::atomic<uint64_t> everybody;  // 1: the process has no other thread that could make a call
  std::atomic<uint64_t> count;
  Waiting waits[kBoardWaits];
};

// The start of every arena.
struct ArenaHeader {
  uint64_t magic;                                 // build_id(): the owner has the same layouts
  std::atomic<uint64_t> pool_offset, pool_bytes;  // of the gradients, once there is a pool
  Doorbell doorbell;
  WaitBoard board;
  // The owner holds alive[w] as long as its process lives, and local rank w watches it. Each watcher has its own mutex,
  // since a watcher that has taken over a dead owner's mutex would hide the death from the others.
  pthread_mutex_t alive[kMaxLocalRanks];
};

}  // namespace syncengine::shm
