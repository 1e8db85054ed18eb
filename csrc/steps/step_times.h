// The last steps of a model: when their parts began, and each rank's own time in them. A rank sends its time with the
// next step, as a word of the flags of the bucket that is the vote; a step without such a bucket has an operation for
// it. syncengine/parallel/summary.py computes from them the line at the end of a run, values for loggers and for DDP's
// logging data, and who is late.
//
// A step lasts from the end of one synchronized backward to the end of the next one, so it includes what the program
// does in between. Its wait begins with the end of this rank's own backward and ends when the averages are there.
//
// Ownership: shared by the reducer and by Python, which may ask when the reducer is gone. Thread-safety: any thread.
// Failure: none. Costs of a step: five readings of the clock, and no allocation but that of its stamps.
#pragma once

#include <algorithm>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <mutex>
#include <utility>
#include <vector>

#include "base/phase_clock.h"

namespace syncengine {

// Packs four times in microseconds into 16 bits each: 11 of mantissa and 5 of exponent. 0 means no times.
inline uint64_t pack_stamp(const PhaseClock::Own& own) {
  uint64_t stamp = 0;
  for (size_t phase = 0; phase < own.size(); ++phase) {
    const uint64_t time = static_cast<uint64_t>(std::max<int64_t>(own[phase], 0)) / 1000;
    const int shift = std::clamp(static_cast<int>(std::bit_width(time)) - 11, 0, 31);
    stamp |= (std::min<uint64_t>(time >> shift, 0x7ff) | static_cast<uint64_t>(shift) << 11) << 16 * phase;
  }
  return stamp;
}

class StepTimes {
 public:
  static constexpr size_t kKept = 1024, kCompared = 100;  // steps: with their times, and with their stamps

  // Times of the events of a step, in trace::now()'s nanoseconds; 0 for events that did not happen.
  struct Step {
    int64_t before = 0;    // the last step ended
    int64_t forward = 0;   // the forward begins
    int64_t backward = 0;  // the backward begins
    int64_t comm = 0;      // the reduction of the first bucket begins
    int64_t wait = 0;      // this rank's own backward ends
    int64_t end = 0;
  };
  struct Summary {
    uint64_t steps = 0, bytes = 0;  // synchronized backwards that have ended well, and what they have reduced
    std::vector<Step> last = {};    // in no order
    std::vector<std::vector<uint64_t>> stamps = {};  // by step and rank, the last step behind
  };

  // Notes that a synchronized backward has ended well and has reduced `bytes`. Returns when the last one ended, or 0.
  int64_t end(Step step, uint64_t bytes) {
    std::lock_guard lock(mutex_);
    step.before = std::exchange(last_end_, step.end);
    if (kept_.last.size() < kKept) kept_.last.emplace_back();
    kept_.last[kept_.steps++ % kKept] = step;
    kept_.bytes += bytes;
    return step.before;
  }

  // Notes that a synchronized backward has failed: the time until the next one ends is no step.
  void interrupt() {
    std::lock_guard lock(mutex_);
    last_end_ = 0;
  }

  // Keeps all ranks' stamps of one step, unless fewer than two ranks have any, so that there is nothing to compare.
  void compare(std::vector<uint64_t> stamps) {
    if (std::count(stamps.begin(), stamps.end(), 0) + 2 > static_cast<ptrdiff_t>(stamps.size())) return;
    std::lock_guard lock(mutex_);
    if (kept_.stamps.size() == kCompared) kept_.stamps.erase(kept_.stamps.begin());
    kept_.stamps.push_back(std::move(stamps));
  }

  Summary summary() const {
    std::lock_guard lock(mutex_);
    return kept_;
  }

 private:
  mutable std::mutex mutex_;
  int64_t last_end_ = 0;
  Summary kept_;
};

}  // namespace syncengine
