// What an engine does about every 50 ms while something waits: it lets its communicators check themselves and their
// peers, and ends the waits of ranks that wait for each other.
#include <algorithm>
#include <bit>

#include "base/sync_point.h"
#include "engine/progress/engine.h"
#include "transport/shm/liveness.h"

namespace syncengine {

void Engine::check_health() {
  sync_point("looking");
  std::lock_guard lock(lock_);
  auto progressables = progressables_;  // a failure may reach others
  for (Progressable* progressable : progressables) progressable->check_health();
  publish_waits();
  if (uint64_t stuck = deadlock_detector_->search()) end_deadlock(stuck);
}

bool Engine::is_dead(int local_rank) {
  uint64_t bit = uint64_t{1} << local_rank;
  if (local_rank == local_rank_) return false;
  if (!(dead_ & bit) && shm::found_dead(peers_[local_rank]->header(), local_rank_)) dead_ |= bit;
  return dead_ & bit;
}

void Engine::publish_waits() {
  std::vector<DeadlockDetector::Wait> waits;
  // The last of them to come has counted while all others were here; nobody else was left to start another thread
  // since.
  bool everybody = true;
  for (const Sleeper* sleeper : sleepers_) {
    waits.push_back(sleeper->owner.wait_of(sleeper->work));
    everybody &= static_cast<size_t>(sleeper->callers) <= sleepers_.size() && !sleeper->gives_up;
  }
  deadlock_detector_->publish(waits, everybody);
}

// Each rank that finds it fails what it waits for itself, and what the others wait for from it.
void Engine::end_deadlock(uint64_t stuck) {
  const Sleeper& first = *sleepers_.front();
  std::string text;
  for (const auto& link : deadlock_detector_->chain(stuck)) {
    text += text.empty() ? name_of(link.rank) + " waits in " + first.owner.describe_wait(first.work)
                         : ", which waits in " + describe_wait(link.rank, link.wait, first.owner);
    text += " for " + name_of(link.next);
  }
  text += ": the ranks make different calls";
  std::vector<Progressable*> failing;
  for (Progressable* progressable : progressables_) {
    bool mine = std::any_of(sleepers_.begin(), sleepers_.end(), [&](auto* s) { return &s->owner == progressable; });
    for (uint64_t left = stuck & ~(uint64_t{1} << local_rank_); left != 0; left &= left - 1) {
      int rank = std::countr_zero(left);
      for (const auto& wait : deadlock_detector_->waits_for_me(rank)) mine |= progressable->has_block(rank, wait.group);
    }
    if (mine) failing.push_back(progressable);
  }
  for (Progressable* progressable : failing) progressable->fail(ErrorKind::Mismatch, text);
}

std::string Engine::who_waits_for_me(uint64_t local_ranks, const Progressable& beside) const {
  std::string text;
  for (uint64_t left = local_ranks & ~(uint64_t{1} << local_rank_); left != 0; left &= left - 1) {
    int rank = std::countr_zero(left);
    for (const auto& wait : deadlock_detector_->waits_for_me(rank))
      text += (text.empty() ? "" : ", ") + name_of(rank) + " waits in " + describe_wait(rank, wait, beside) + " for " +
              name_of(local_rank_);
  }
  return text;
}

// `beside`: the communicator that the reader has in mind.
std::string Engine::describe_wait(int local_rank, const DeadlockDetector::Wait& wait,
                                  const Progressable& beside) const {
  std::string number = std::to_string(wait.place.number);
  std::string text = wait.place.lane == shm::kUserLane ? "its collective call number " + number
                                                       : "a gradient bucket (number " + number + ")";
  return beside.has_block(local_rank, wait.group) ? text : text + " of another communicator";
}

}  // namespace syncengine
