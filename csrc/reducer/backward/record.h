// The history of a model's synchronized backwards: for the next plan, and for Python.
//
// Ownership: the model's. Thread-safety: the reducer's lock.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "base/phase_clock.h"
#include "base/trace.h"
#include "reducer/buckets/nonfinite.h"
#include "steps/statistics.h"
#include "steps/step_times.h"

namespace syncengine {

struct Record {
  Statistics statistics = {};
  // The times of the last steps, which Python may hold longer than the model lives.
  const std::shared_ptr<StepTimes> step_times = std::make_shared<StepTimes>();
  // Parameters in the order in which the last backward brought them, without those that it did not bring.
  std::vector<size_t> ready_order = {};
  // Whether each backward so far has brought the same gradients on this rank.
  bool graph_is_static = true;

  NonfiniteWarnings nonfinite_warnings = {};

  // This rank's own times in the last step, to be told to the others; 0 if there are none.
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
  // Notes that a synchronized backward has ended well; see StepTimes. `model` is the model's name.
  void end_backward(const std::string& model) {
    PhaseClock& clock = PhaseClock::of_process();
    step_.end = clock.enter(PhaseClock::Input);
    const PhaseClock::Own own = clock.take();
    const int64_t before = step_times->end(step_, statistics.reduced_bytes);
    // A step without a forward (a rank without a batch), or the first one, can't be compared with others'.
    stamp = before != 0 && step_.forward != 0 ? pack_stamp(own) : 0;
    if (trace::is_on() && before != 0) trace_step(before, model);
    step_ = {};
    const auto last = std::exchange(last_used_, used_);
    graph_is_static &= !last || last == last_used_;
  }
  // Notes that a synchronized backward has failed.
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

  StepTimes::Step step_;  // the step that is running
  uint64_t used_ = 0;     // a sum over the parameters in `ready_order`
  std::optional<uint64_t> last_used_;
};

}  // namespace syncengine
