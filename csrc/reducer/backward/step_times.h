// How long training steps take, and how much of that a rank spends waiting for averages: for the line at the end of a
// run, and for loggers.
//
// A step lasts from the end of one synchronized backward to the end of the next one, so it includes what the program
// does in between. Its wait begins with the end of this rank's own backward and ends when the averages are there.
//
// Ownership: shared by the reducer and by Python, which may ask when the reducer is gone. Thread-safety: any thread.
// Costs of a step: two readings of the clock, and no allocation.
#pragma once

#include <algorithm>
#include <array>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <mutex>
#include <vector>

namespace syncengine {

class StepTimes {
 public:
  static constexpr size_t kKept = 1024;  // medians are those of the last ones

  // Times in nanoseconds; 0 where none is known.
  struct Summary {
    uint64_t steps = 0;  // synchronized backwards that have ended well
    uint64_t bytes = 0;  // that they have reduced
    int64_t median = 0, median_wait = 0;
  };

  static int64_t now() {
    return std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::steady_clock::now().time_since_epoch())
        .count();
  }

  // A synchronized backward has ended well, which has reduced `bytes`, and whose wait began at `waited_from`.
  void end(int64_t waited_from, uint64_t bytes) {
    const int64_t at = now();
    std::lock_guard lock(mutex_);
    waits_[steps_ % kKept] = at - waited_from;
    ++steps_;
    bytes_ += bytes;
    if (last_end_ != 0) durations_[timed_++ % kKept] = at - last_end_;
    last_end_ = at;
  }

  // One has failed: what comes until the next one ends is no step.
  void interrupt() {
    std::lock_guard lock(mutex_);
    last_end_ = 0;
  }

  Summary summary() const {
    std::lock_guard lock(mutex_);
    return {
        .steps = steps_, .bytes = bytes_, .median = median(durations_, timed_), .median_wait = median(waits_, steps_)};
  }

 private:
  using Kept = std::array<int64_t, kKept>;

  static int64_t median(const Kept& kept, uint64_t count) {
    if (count == 0) return 0;
    std::vector<int64_t> sorted(kept.begin(), kept.begin() + static_cast<ptrdiff_t>(std::min<uint64_t>(count, kKept)));
    const auto middle = sorted.begin() + static_cast<ptrdiff_t>(sorted.size() / 2);
    std::nth_element(sorted.begin(), middle, sorted.end());
    return *middle;
  }

  mutable std::mutex mutex_;
  uint64_t steps_ = 0, timed_ = 0, bytes_ = 0;
  int64_t last_end_ = 0;
  Kept durations_{}, waits_{};
};

}  // namespace syncengine
