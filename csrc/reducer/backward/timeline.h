// When things happened in a step: nanoseconds since the epoch, 0 for what did not happen.
#pragma once

#include <c10/util/ApproximateClock.h>

#include <algorithm>
#include <cstdint>

namespace syncengine {

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

}  // namespace syncengine
