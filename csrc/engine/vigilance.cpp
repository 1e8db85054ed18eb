// What a communicator does about every 50 ms while something waits: deaths, departures, deadlines and cycles. These are the
// parts of ShmCommunicator that turn a wait that can't end into a named error.
#include <algorithm>
#include <cstdio>

#include "engine/mismatch.h"
#include "engine/shm_communicator.h"

namespace syncengine {

namespace {

constexpr auto kCycleAfter =
    std::chrono::milliseconds(300);  // longer than any peer needs to make its next step visible

double to_seconds(Duration duration) { return std::chrono::duration<double>(duration).count(); }

std::string seconds_text(Duration duration) {
  char text[32];
  std::snprintf(text, sizeof(text), "%.1f s", to_seconds(duration));
  return text;
}

}  // namespace

void ShmCommunicator::look_around() {
  if (ended_) return;
  heed_peers();
  if (!ended_) heed_deadline();
  if (!ended_) heed_cycle();
}

ShmCommunicator::Pending ShmCommunicator::oldest() const {
  Pending oldest;
  auto consider = [&](const auto& queue) {
    const Lane::Item* item = queue.oldest();
    if (item && (!oldest.item || item->since < oldest.item->since)) oldest = {item, queue.culprits()};
  };
  consider(user_lane_);
  consider(scheduled_lane_);
  consider(schedule_);
  return oldest;
}

std::string ShmCommunicator::what_is_pending() const {
  auto [item, culprits] = oldest();
  if (!item) return "";
  std::string who = group_.name(group_.rank) + (culprits ? " waits for " + group_.names(culprits) : " is not done");
  return who + " since " + seconds_text(Clock::now() - item->since) + " in " + describe(item->operation);
}

void ShmCommunicator::heed_peers() {
  const Lane::Item* item = oldest().item;
  std::string what = item ? " while " + group_.name(group_.rank) + " was in " + describe(item->operation) : "";
  for (int member = 0; member < group_.size; ++member) {
    if (member == group_.rank) continue;
    bool dead = engine_->is_dead(group_.local_ranks[member]);  // before its farewell is read: it may say why
    const shm::Farewell& farewell = group_.block(member).farewell;
    auto standing = static_cast<shm::Standing>(farewell.standing.load(std::memory_order_acquire));
    if (standing == shm::Standing::Failed) return fail(static_cast<ErrorKind>(farewell.kind), farewell.text);
    if (dead && standing != shm::Standing::Left) return fail(ErrorKind::PeerLost, group_.name(member) + " died" + what);
    // What it did before it left is visible only now.
    if (standing == shm::Standing::Left && item && missing(true) >> member & 1)
      return fail(ErrorKind::PeerLost,
                  group_.name(member) + " has left (it exited or called syncengine.shutdown())" + what);
  }
}

void ShmCommunicator::heed_deadline() {
  const Lane::Item* item = oldest().item;
  if (!item) return;
  Duration age = Clock::now() - item->since;
  if (age < std::min(engine_->options().log_after, engine_->options().timeout)) return;
  if (age >= engine_->options().timeout) {
    return fail(ErrorKind::Timeout, what_is_pending() + ": the timeout is " + seconds_text(engine_->options().timeout) +
                                        "; see what those ranks are doing, or raise init(timeout=...)");
  }
  if (logged_ == item->since) return;
  logged_ = item->since;
  std::fprintf(stderr, "[syncengine] %s\n", what_is_pending().c_str());
}

void ShmCommunicator::publish_waiting(const Work::Place& place, bool waiting) {
  shm::Waiting& own = group_.own().waiting;
  uint64_t stamp = own.stamp.load(std::memory_order_relaxed);
  if (waiting && stamp % 2 == 0 && engine_->is_single_threaded()) {
    own.lane.store(place.lane, std::memory_order_relaxed);
    own.number.store(place.number, std::memory_order_relaxed);
    own.epoch.store(place.epoch, std::memory_order_relaxed);
    own.stamp.store(stamp + 1, std::memory_order_release);  // release: the place
  } else if (!waiting && stamp % 2 == 1) {
    own.stamp.store(stamp + 1, std::memory_order_release);
  }
}

bool ShmCommunicator::arrived_here(const Work::Place& place) const {
  std::lock_guard lock(submit_mutex_);
  if (place.lane == shm::kUserLane) return submitted_ > place.number;
  auto found = announced_.find(place.number);
  return found != announced_.end() && found->second >= place.epoch;
}

// This rank's only thread needs a peer whose own only thread needs this rank elsewhere: neither can ever go on. Where several
// threads submit, another one may bring what the peer waits for, and only the deadline tells.
void ShmCommunicator::heed_cycle() {
  const shm::Waiting& own = group_.own().waiting;
  if (own.stamp.load(std::memory_order_relaxed) % 2 == 0 || !engine_->is_single_threaded()) return;
  Work::Place mine{static_cast<int>(own.lane.load(std::memory_order_relaxed)),
                   own.number.load(std::memory_order_relaxed), own.epoch.load(std::memory_order_relaxed)};
  for (int member = 0; member < group_.size; ++member) {
    const shm::GroupBlock& peer = group_.block(member);
    bool came = mine.lane == shm::kUserLane
                    ? peer.lanes[shm::kUserLane].progress.opened.load(std::memory_order_acquire) > mine.number
                    : peer.announced[mine.number].load(std::memory_order_acquire) >= mine.epoch;
    if (member == group_.rank || came) continue;
    uint64_t stamp = peer.waiting.stamp.load(std::memory_order_acquire);  // acquire: the place
    Work::Place theirs{static_cast<int>(peer.waiting.lane.load(std::memory_order_relaxed)),
                       peer.waiting.number.load(std::memory_order_relaxed),
                       peer.waiting.epoch.load(std::memory_order_relaxed)};
    // Who waits for a later call of the lane has made this one, even if its engine has not come to it yet.
    bool beyond = mine.lane == shm::kUserLane && theirs.lane == shm::kUserLane && theirs.number >= mine.number;
    std::atomic_thread_fence(std::memory_order_acquire);  // the place was read before the stamp is read again
    bool torn = peer.waiting.stamp.load(std::memory_order_relaxed) != stamp;
    if (stamp % 2 == 0 || torn || beyond || arrived_here(theirs)) continue;
    if (cycle_member_ != member || cycle_stamp_ != stamp) {
      cycle_member_ = member;
      cycle_stamp_ = stamp;
      cycle_since_ = Clock::now();
      return;
    }
    if (Clock::now() - cycle_since_ < kCycleAfter) return;
    const Lane::Item* item = oldest().item;
    std::string there = theirs.lane == shm::kUserLane
                            ? "its collective call number " + std::to_string(theirs.number)
                            : "a gradient bucket (number " + std::to_string(theirs.number) + ")";
    return fail(ErrorKind::Mismatch, group_.name(group_.rank) + " waits in " +
                                         (item ? describe(item->operation) : "a collective") + " for " +
                                         group_.name(member) + ", which waits in " + there + " for " +
                                         group_.name(group_.rank) + ": the ranks make different calls");
  }
}

}  // namespace syncengine
