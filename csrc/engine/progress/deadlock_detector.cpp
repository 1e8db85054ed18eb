#include "engine/progress/deadlock_detector.h"

#include <algorithm>
#include <bit>

namespace syncengine {

DeadlockDetector::DeadlockDetector(std::vector<shm::WaitBoard*> boards, int local_rank)
    : boards_(std::move(boards)), me_(local_rank), seen_(boards_.size()), first_(boards_.size()) {}

void DeadlockDetector::publish(const std::vector<Wait>& waits, bool everybody) {
  shm::WaitBoard& board = *boards_[me_];
  everybody = everybody && waits.size() <= shm::kBoardWaits;
  if (everybody != everybody_ || waits != waits_) {
    uint64_t version = board.version.load(std::memory_order_relaxed);  // relaxed: its only writer
    board.version.store(version + 1, std::memory_order_relaxed);
    std::atomic_thread_fence(std::memory_order_release);  // the odd version before the content
    size_t count = std::min(waits.size(), shm::kBoardWaits);
    for (size_t i = 0; i < count; ++i) {
      board.waits[i].group.store(waits[i].group, std::memory_order_relaxed);
      board.waits[i].lane.store(static_cast<uint64_t>(waits[i].place.lane), std::memory_order_relaxed);
      board.waits[i].number.store(waits[i].place.number, std::memory_order_relaxed);
      board.waits[i].missing.store(waits[i].missing, std::memory_order_relaxed);
    }
    board.count.store(count, std::memory_order_relaxed);
    board.everybody.store(everybody, std::memory_order_relaxed);
    board.version.store(version + 2, std::memory_order_release);  // release: the content, and the calls made before it
    waits_ = waits;
    everybody_ = everybody;
  }
  board.looks.fetch_add(1, std::memory_order_seq_cst);  // a peer that sees this look begins its next one after it
  std::atomic_thread_fence(std::memory_order_seq_cst);  // what the next look loads (`called`) is no older than it
}

// Reads the board of `rank`; a board that changes meanwhile is read as one without waits.
DeadlockDetector::Board DeadlockDetector::read(int rank) const {
  const shm::WaitBoard& board = *boards_[rank];
  Board copy;
  copy.version = board.version.load(std::memory_order_acquire);  // acquire: the content
  copy.looks = board.looks.load(std::memory_order_acquire);
  copy.everybody = board.everybody.load(std::memory_order_relaxed) != 0;
  size_t count = std::min<size_t>(board.count.load(std::memory_order_relaxed), shm::kBoardWaits);
  for (size_t i = 0; i < count; ++i) {
    const shm::Waiting& wait = board.waits[i];
    Wait& read = copy.waits.emplace_back();
    read.group = wait.group.load(std::memory_order_relaxed);
    read.place.lane = static_cast<int>(wait.lane.load(std::memory_order_relaxed));
    read.place.number = wait.number.load(std::memory_order_relaxed);
    read.missing = wait.missing.load(std::memory_order_relaxed);
  }
  std::atomic_thread_fence(std::memory_order_acquire);  // the content was read before the version is read again
  bool torn = copy.version % 2 != 0 || board.version.load(std::memory_order_relaxed) != copy.version;
  return torn ? Board{} : copy;
}

uint64_t DeadlockDetector::search() {
  if (!everybody_ || waits_.empty()) return 0;
  uint64_t stuck = 0;
  for (size_t rank = 0; rank < boards_.size(); ++rank) {
    seen_[rank] = read(static_cast<int>(rank));
    if (seen_[rank].everybody && !seen_[rank].waits.empty()) stuck |= uint64_t{1} << rank;
  }
  // A rank with a wait that no stuck rank holds up will go on one day, and so will ranks that wait only for it.
  const auto goes_on = [&](const Wait& wait) { return (wait.missing & stuck) == 0; };
  for (uint64_t before = 0; before != stuck;) {
    before = stuck;
    for (size_t rank = 0; rank < boards_.size(); ++rank)
      if (std::ranges::any_of(seen_[rank].waits, goes_on)) stuck &= ~(uint64_t{1} << rank);
  }
  if (!(stuck >> me_ & 1)) return 0;
  bool believed = true, changed = false;
  for (uint64_t left = stuck; left != 0; left &= left - 1) {
    int rank = std::countr_zero(left);
    changed |= seen_[rank].version != first_[rank].version;
    believed &= seen_[rank].looks >= first_[rank].looks + 2;  // the second of them began after the first was seen
  }
  if (changed) first_ = seen_;
  return believed && !changed ? stuck : 0;
}

std::vector<DeadlockDetector::Link> DeadlockDetector::chain(uint64_t stuck) const {
  std::vector<Link> links;
  uint64_t visited = 0;
  for (int rank = me_; !(visited >> rank & 1); rank = links.back().next) {
    visited |= uint64_t{1} << rank;
    const Wait& wait = seen_[rank].waits.front();
    links.push_back({rank, wait, std::countr_zero(wait.missing & stuck)});
  }
  return links;
}

std::vector<std::pair<int, DeadlockDetector::Wait>> DeadlockDetector::waits_for_me(uint64_t ranks) const {
  std::vector<std::pair<int, Wait>> waits;
  for (uint64_t left = ranks & ~(uint64_t{1} << me_); left != 0; left &= left - 1) {
    const int rank = std::countr_zero(left);
    const Board board = read(rank);
    for (const Wait& wait : board.waits)
      if (wait.missing >> me_ & 1) waits.push_back({rank, wait});
  }
  return waits;
}

}  // namespace syncengine
