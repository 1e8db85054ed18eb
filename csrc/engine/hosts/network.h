// One process's connections to the ranks of other hosts: who moves the bytes, and whose message is whose.
//
// Ownership: shared by the communicators that reach over hosts; keeps the engine. Thread-safety: all calls under the engine's
// progress lock, but Carrier's. Failure: garbage from a peer fails all communicators; what else fails a peer is told by
// Interhost::failure().
#pragma once

#include <atomic>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "collectives/hop_choice.h"
#include "engine/carrier.h"
#include "engine/engine.h"
#include "transport/interhost.h"

namespace syncengine::hosts {

// Hears the messages of one communicator, under the progress lock.
class Listener {
 public:
  virtual ~Listener() = default;
  virtual void hear(int peer, const std::string& message) = 0;  // `peer`: rank of the job; may throw PeerLost
  virtual void give_up(const Error& error) = 0;                 // nothing that comes can be relied on any more
};

// A transfer's tag: communicator, lane, chunk of the lane, parcel of the chunk, and whether it is sent unasked: of two ranks that
// mean different operations one may send unasked what the other waits for in another size, and neither shall match.
inline constexpr int kGroupBits = 20, kLaneBits = 2, kUnaskedBits = 1, kChunkBits = 23, kParcelBits = 18;
static_assert(kGroupBits + kLaneBits + kUnaskedBits + kChunkBits + kParcelBits == 64);
inline constexpr int kGroupShift = 64 - kGroupBits;
constexpr uint64_t tag_of(uint32_t group, int lane, uint64_t chunk, uint32_t parcel, size_t bytes) {
  uint64_t unasked = bytes <= Interhost::kMaxUnasked;
  uint64_t turn = chunk % (uint64_t{1} << kChunkBits);  // far more than are ever under way
  return uint64_t{group} << kGroupShift | static_cast<uint64_t>(lane) << (kUnaskedBits + kChunkBits + kParcelBits) |
         unasked << (kChunkBits + kParcelBits) | turn << kParcelBits | parcel;
}

class Network final : public Carrier, private Movable {
 public:
  Network(std::shared_ptr<Engine> engine, std::unique_ptr<Interhost> interhost);
  ~Network() override;

  const std::shared_ptr<Engine>& engine() const { return engine_; }
  Interhost& interhost() { return *interhost_; }

  // As measured when the job began.
  LinkSpeed speed() const { return speed_.value_or(LinkSpeed{}); }
  bool is_measured() const { return speed_.has_value(); }
  void set_speed(const LinkSpeed& speed) { speed_ = speed; }

  // A number for a new communicator is one that none of its members has used.
  uint32_t unused_group() const { return next_group_; }
  // Throws InvalidUsage if there were too many. Hands over what came before.
  void enroll(uint32_t group, Listener* listener);
  void forget(uint32_t group);

  void hear_all();  // hands all that has come to its listeners
  void withdraw(uint32_t group, const Error& error);

  bool claim() override;
  bool carry(Duration at_most) override;
  void release() override;
  void wake() override;
  void come() override;

 private:
  void thread_main();
  void park();
  void deliver(Interhost::Message message);

  // Movable, under the progress lock: messages are heard before anything else is done.
  bool advance() override;
  uint64_t interest() const override { return 0; }
  void look_around() override {}
  void lose_direct_memory(const Error&) override {}
  void fail(ErrorKind, const std::string&) override {}
  void leave() override {}
  Standstill::Wait wait_of(const Work&) const override { return {}; }
  bool has_block(int, uint64_t) const override { return false; }
  std::string describe_wait(const Work&) const override { return ""; }

  std::shared_ptr<Engine> engine_;
  std::unique_ptr<Interhost> interhost_;
  std::map<uint32_t, Listener*> listeners_;
  std::map<uint32_t, std::vector<Interhost::Message>> early_;  // of communicators that this rank is about to make
  uint32_t next_group_ = 0;
  bool heard_ = false;
  std::optional<LinkSpeed> speed_;

  std::mutex moving_;  // of whoever makes steps; no other lock is held where it is asked for
  std::unique_lock<std::mutex> claimers_{moving_, std::defer_lock};  // of the thread that claimed
  std::atomic<bool> claimed_{false};
  std::atomic<bool> woken_{false};  // that thread
  std::atomic<uint64_t> claims_{0};
  std::atomic<bool> parked_{false};  // the own thread
  std::atomic<uint32_t> word_{0};    // futex word where it is parked
  std::atomic<bool> stopping_{false};
  uint64_t claims_seen_ = 0;  // by the own thread, as is the next
  uint32_t word_seen_ = 0;
  std::thread thread_;
};

}  // namespace syncengine::hosts
