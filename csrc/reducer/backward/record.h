// What has happened in a model's synchronized backwards: for the next plan, and for Python.
//
// Ownership: the model's. Thread-safety: the reducer's lock.
#pragma once

#include <c10/util/ApproximateClock.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <utility>
#include <vector>

#include "reducer/gradients/statistics.h"

namespace syncengine {

// How long training steps take, and how much of that a rank spends waiting for averages: for the line at the end of a
// run, and for loggers.
//
// A step lasts from the end of one synchronized backward to the end of the next one, so it includes what the program
// does in between. Its wait begins with the end of this rank's own backward and ends when the averages are there.
//
// Ownership: shared by the reducer and by Python, which may ask when the reducer is gone. Thread-safety: any thread.
// Costs of a step: two readings of the clock, and no allocation.

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

// When things happened in a step: nanoseconds since the epoch, 0 for what did not happen.

class Timeline {
 public:
  struct Step {
    int64_t forward_start = 0;
    int64_t backward_start = 0;
    int64_t backward_end = 0;  // the last gradient
    int64_t comm_start = 0;    // the first bucket
    int64_t comm_end = 0;

    int64_t forward() const { return backward_start - forward_start; }
    int64_t backward() const { return backward_end - backward_start; }
    int64_t comm() const { return comm_end - comm_start; }
    int64_t overlap() const { return std::max<int64_t>(0, backward_end - comm_start); }
  };

  // Over all timed steps.
  struct Totals {
    int64_t steps = 0, forward = 0, backward = 0, comm = 0, overlap = 0;
  };

  // As DDP: the first 10 steps are timed, and then one of `rate`.
  void set_sample_rate(uint64_t rate) { rate_ = rate; }
  bool timed(uint64_t step) const { return step < 10 || step % rate_ == 0; }

  // `step`: how many synchronized backwards there were before.
  void begin_forward(uint64_t step) {
    if (timed(step)) forward_start_ = c10::getTime();
  }
  void begin_backward(uint64_t step) {
    now_ = timed(step);
    if (!now_) return;
    step_ = {.forward_start = forward_start_, .backward_start = c10::getTime()};
  }
  void gradient() {
    if (now_) step_.backward_end = c10::getTime();
  }
  void bucket() {
    if (now_ && step_.comm_start == 0) step_.comm_start = c10::getTime();
  }
  void end() {
    if (!now_) return;
    step_.comm_end = c10::getTime();
    now_ = false;
    if (step_.backward_end == 0 || step_.comm_start == 0) return;  // nothing of this rank's own
    ++totals_.steps;
    totals_.forward += step_.forward();
    totals_.backward += step_.backward();
    totals_.comm += step_.comm();
    totals_.overlap += step_.overlap();
    last_ = step_;
  }

  // The last timed one that has ended.
  const Step& last() const { return last_; }
  const Totals& totals() const { return totals_; }

 private:
  uint64_t rate_ = 100;
  int64_t forward_start_ = 0;
  bool now_ = false;
  Step step_, last_;
  Totals totals_;
};

struct Record {
  Statistics statistics = {};
  Timeline timeline = {};
  // Of all steps; it may outlive the model.
  const std::shared_ptr<StepTimes> step_times = std::make_shared<StepTimes>();
  // Parameters, as the last backward brought them; those that it did not bring are missing.
  std::vector<size_t> ready_order = {};
  // Whether each backward so far has brought the same gradients on this rank.
  bool graph_is_static = true;

  void begin_forward() { timeline.begin_forward(statistics.backwards); }
  void begin_backward(size_t parameters, size_t buckets) {
    ready_order.clear();
    ready_order.reserve(parameters);
    used_ = 0;
    timeline.begin_backward(statistics.backwards);
    statistics = {.backwards = statistics.backwards + 1, .buckets = buckets};
  }
  void gradient(size_t parameter) {
    ready_order.push_back(parameter);
    used_ += (parameter + 1) * 0x9e3779b97f4a7c15u ^ parameter;
    timeline.gradient();
  }
  // It has ended well; see StepTimes.
  void end_backward(int64_t waited_from) {
    timeline.end();
    step_times->end(waited_from, statistics.reduced_bytes);
    const auto last = std::exchange(last_used_, used_);
    graph_is_static &= !last || last == last_used_;
  }

 private:
  uint64_t used_ = 0;  // a sum over the parameters in `ready_order`
  std::optional<uint64_t> last_used_;
};

}  // namespace syncengine
