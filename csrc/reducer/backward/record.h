// What has happened in a model's synchronized backwards: for the next plan, and for Python.
//
// Ownership: the model's. Thread-safety: the reducer's lock.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "base/phase_clock.h"
#include "base/trace.h"
#include "reducer/backward/stragglers.h"
#include "reducer/gradients/statistics.h"

namespace syncengine {

// How long training steps take, and how much of that a rank spends waiting for averages: for the line at the end of a
// run, for loggers, and for DDP's logging data.
//
// A step lasts from the end of one synchronized backward to the end of the next one, so it includes what the program
// does in between. Its wait begins with the end of this rank's own backward and ends when the averages are there.
//
// Ownership: shared by the reducer and by Python, which may ask when the reducer is gone. Thread-safety: any thread.
// Costs of a step: five readings of the clock, and no allocation but that of its stamps.

class StepTimes {
 public:
  static constexpr size_t kKept = 1024;  // medians are those of the last ones

  // When things happened in a step: trace::now()'s nanoseconds; 0 for what did not happen.
  struct Step {
    int64_t forward = 0;  // these begin
    int64_t backward = 0;
    int64_t comm = 0;  // with the first bucket
    int64_t wait = 0;  // with the end of this rank's own backward
    int64_t end = 0;
  };
  // Of all steps that had all of this.
  struct Totals {
    int64_t steps = 0, forward = 0, backward = 0, comm = 0, overlap = 0;
    void add(const Step& step) {
      if (step.forward == 0 || step.comm == 0) return;
      ++steps;
      forward += step.backward - step.forward;
      backward += step.wait - step.backward;
      comm += step.end - step.comm;
      overlap += std::max<int64_t>(0, step.wait - step.comm);
    }
  };

  // Times in nanoseconds; 0 where none is known.
  struct Summary {
    uint64_t steps = 0;  // synchronized backwards that have ended well
    uint64_t bytes = 0;  // that they have reduced
    int64_t median = 0, median_wait = 0;
    Step last = {};
    Totals totals = {};
  };

  // A synchronized backward has ended well, which has reduced `bytes`. Returns when the last one had, or 0.
  int64_t end(const Step& step, uint64_t bytes) {
    std::lock_guard lock(mutex_);
    waits_[steps_ % kKept] = step.end - step.wait;
    ++steps_;
    bytes_ += bytes;
    last_ = step;
    totals_.add(step);
    if (last_end_ != 0) durations_[timed_++ % kKept] = step.end - last_end_;
    return std::exchange(last_end_, step.end);
  }

  // One has failed: what comes until the next one ends is no step.
  void interrupt() {
    std::lock_guard lock(mutex_);
    last_end_ = 0;
  }

  void compare(std::vector<uint64_t> stamps) {
    std::lock_guard lock(mutex_);
    stragglers_.add(std::move(stamps));
  }

  // See Stragglers.
  std::vector<std::vector<PhaseClock::Own>> own() const {
    std::lock_guard lock(mutex_);
    return stragglers_.own();
  }

  Summary summary() const {
    std::lock_guard lock(mutex_);
    return {.steps = steps_,
            .bytes = bytes_,
            .median = median(durations_, timed_),
            .median_wait = median(waits_, steps_),
            .last = last_,
            .totals = totals_};
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
  Step last_;
  Totals totals_;
  Kept durations_{}, waits_{};
  Stragglers stragglers_;
};

struct Record {
  Statistics statistics = {};
  // Of all steps; it may outlive the model.
  const std::shared_ptr<StepTimes> step_times = std::make_shared<StepTimes>();
  // Parameters, as the last backward brought them; those that it did not bring are missing.
  std::vector<size_t> ready_order = {};
  // Whether each backward so far has brought the same gradients on this rank.
  bool graph_is_static = true;

  // This rank's own times in the last step, for the others; 0: there are none.
  uint64_t stamp = 0;

  void begin_forward() { step_.forward = PhaseClock::of_process().enter(PhaseClock::Forward); }
  void begin_backward(size_t parameters, size_t buckets) {
    ready_order.clear();
    ready_order.reserve(parameters);
    used_ = 0;
    step_ = {.forward = step_.forward, .backward = PhaseClock::of_process().enter(PhaseClock::Backward)};
    statistics = {.backwards = statistics.backwards + 1, .buckets = buckets};
  }
  void gradient(size_t parameter) {
    ready_order.push_back(parameter);
    used_ += (parameter + 1) * 0x9e3779b97f4a7c15u ^ parameter;
  }
  void bucket() {
    if (step_.comm == 0) step_.comm = trace::now();
  }
  void no_batch() { step_.forward = 0; }
  void begin_wait() { step_.wait = PhaseClock::of_process().enter(PhaseClock::Wait); }
  // It has ended well; see StepTimes. `model`: its name.
  void end_backward(const std::string& model) {
    PhaseClock& clock = PhaseClock::of_process();
    step_.end = clock.enter(PhaseClock::Input);
    const PhaseClock::Own own = clock.take();
    const int64_t before = step_times->end(step_, statistics.reduced_bytes);
    // Who had no batch, or begins, can't be compared.
    stamp = before != 0 && step_.forward != 0 ? pack_stamp(own) : 0;
    if (trace::is_on() && before != 0) trace_step(before, model);
    step_ = {};
    const auto last = std::exchange(last_used_, used_);
    graph_is_static &= !last || last == last_used_;
  }
  // It has failed.
  void interrupt() {
    PhaseClock::of_process().enter(PhaseClock::Input);
    PhaseClock::of_process().take();
    step_times->interrupt();
    step_ = {};
    stamp = 0;
  }

 private:
  void trace_step(int64_t before, const std::string& model) const {
    trace::Event event{.kind = trace::Kind::Step,
                       .begin = before,
                       .end = step_.end,
                       .place = statistics.backwards,
                       .detail = statistics.reduced_bytes,
                       .text = trace::text(model)};
    trace::record(event);
    auto copied = [&](const char* how, const auto& reasons, const auto& bytes) {
      for (size_t i = 0; i < bytes.size(); ++i) {
        if (bytes[i] == 0) continue;
        trace::record({.kind = trace::Kind::Copy,
                       .begin = step_.end,
                       .end = step_.end,
                       .place = statistics.backwards,
                       .detail = bytes[i],
                       .text = trace::text(std::string(how) + reasons[i])});
      }
    };
    copied("copied ", kCopyReasons, statistics.copied_bytes);
    copied("staged ", kStageReasons, statistics.staged_bytes);
  }

  StepTimes::Step step_;  // that runs
  uint64_t used_ = 0;     // a sum over the parameters in `ready_order`
  std::optional<uint64_t> last_used_;
};

}  // namespace syncengine
