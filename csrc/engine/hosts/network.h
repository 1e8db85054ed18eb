// One engine's connections to the ranks of other hosts: which thread moves the bytes, and which communicator gets a
// message.
//
// Ownership: the communicators that reach over hosts share a network; a network keeps the engine. Thread-safety: all
// calls under the engine's progress lock, except those of IoLoop. Failure: garbage from a peer fails all communicators;
// Interhost::failure() tells of every other failure of a peer.
#pragma once

#include <atomic>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <thread>
#include <vector>

#include "engine/progress/driver.h"
#include "engine/progress/engine.h"
#include "transport/interhost.h"
#include "transport/shm/layout.h"

namespace syncengine::hosts {

class InterhostMembers;

// The parts of a transfer's tag: communicator, lane, chunk of the lane, envelope of the chunk, and whether the transfer
// is sent unasked. The last part is for two ranks that mean different operations: if one sends unasked what the other
// expects in another size, the two must not match.
inline constexpr int kFounderBits = 6, kCountBits = 16, kShrinkBits = 6;
inline constexpr int kGroupBits = kFounderBits + kCountBits + kShrinkBits;
inline constexpr int kLaneBits = 2, kUnaskedBits = 1, kChunkBits = 16, kEnvelopeBits = 17;
static_assert(kGroupBits + kLaneBits + kUnaskedBits + kChunkBits + kEnvelopeBits == 64);
static_assert(shm::kMaxLocalRanks <= 1 << kFounderBits);  // of a job
inline constexpr int kGroupShift = 64 - kGroupBits;

// A communicator's number consists of its founder's rank in the job, how many communicators that rank had founded
// before, and how often this one was shrunk since. So no other rank can take the number, whatever is founded meanwhile.
inline constexpr uint32_t kJobGroup = 0;  // the communicator of all ranks
inline constexpr uint32_t kTooMany = uint32_t{1} << kGroupBits;
constexpr uint32_t after_shrink(uint32_t group) { return (group + 1) % (1 << kShrinkBits) == 0 ? kTooMany : group + 1; }
constexpr bool was_shrunk(uint32_t group) { return group % (1 << kShrinkBits) != 0; }
constexpr uint64_t tag_of(uint32_t group, int lane, uint64_t chunk, uint32_t envelope, size_t bytes) {
  uint64_t unasked = bytes <= Interhost::kMaxUnasked;
  uint64_t turn = chunk % (uint64_t{1} << kChunkBits);  // far more than are ever under way
  return uint64_t{group} << kGroupShift | static_cast<uint64_t>(lane) << (kUnaskedBits + kChunkBits + kEnvelopeBits) |
         unasked << (kChunkBits + kEnvelopeBits) | turn << kEnvelopeBits | envelope;
}

class Network final : public IoLoop, private Progressable {
 public:
  Network(std::shared_ptr<Engine> engine, std::unique_ptr<Interhost> interhost);
  ~Network() override;
  // Destroys `network`. Any thread may call this, even the network's own.
  static void destroy(Network* network) { delete_off(network->thread_, network); }

  const std::shared_ptr<Engine>& engine() const { return engine_; }
  Interhost& interhost() { return *interhost_; }

  // Returns a number for a new communicator that this rank, `rank` of the job, founds; kTooMany if none is left.
  uint32_t take_number(int rank);
  // expect() is called before a communicator is made of which this rank may be a member, and expect_no_more() after
  // that: messages that come for it in between are kept until enroll().
  uint64_t expect();
  void expect_no_more(uint64_t expected);
  // Makes `members` the recipient of its communicator's messages, and hands over those that came before.
  void enroll(uint32_t group, InterhostMembers* members);
  void forget(uint32_t group) { members_.erase(group); }

  bool hear_all();  // hands all received messages to their communicators; true if there were any
  void withdraw(uint32_t group, const std::vector<int>& members, const Error& error);  // ranks of the job

  bool claim() override;
  bool poll(Duration at_most) override;
  void release() override;
  void wake() override;
  void notify() override;

 private:
  void thread_main();
  void deliver(Interhost::Message message);

  // Called in each pass, under the progress lock, before the communicators' advance(): messages are heard first.
  bool advance() override { return hear_all(); }

  std::shared_ptr<Engine> engine_;
  std::unique_ptr<Interhost> interhost_;
  std::map<uint32_t, InterhostMembers*> members_;
  struct Early {
    uint64_t expected;  // the number of the last expect() when a message came
    std::vector<Interhost::Message> messages;
  };
  // The limit of early messages that are kept for one peer, in bytes. In one communicator a peer may be ahead by the
  // records of both lanes and the headers that it may announce, which take about half of these bytes.
  static constexpr size_t kMostEarly = 1 << 20;
  std::map<uint32_t, Early> early_;  // by communicators that this rank is about to make, or will never know
  uint32_t founded_ = 0;             // communicators that this rank has founded
  uint64_t expectations_ = 0;        // calls of expect() so far
  std::set<uint64_t> expected_;      // calls of expect() without expect_no_more() yet

  std::mutex moving_;  // held by the thread that makes steps; a thread that asks for it holds no other lock
  std::unique_lock<std::mutex> claimers_{moving_, std::defer_lock};  // held by the thread that has claimed
  std::atomic<bool> woken_{false};                                   // the thread that has claimed is to return
  Driver driver_{Driver::Kind::Found, [] { return true; }};
  std::thread thread_;
};

}  // namespace syncengine::hosts
