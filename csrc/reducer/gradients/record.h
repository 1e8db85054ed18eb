// The history of a model's synchronized backwards: for the next plan, and for Python.
//
// Ownership: the model's. Thread-safety: the reducer's lock.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "base/phase_clock.h"
#include "base/trace.h"
#include "steps/step_times.h"

namespace syncengine {

// The reason why a gradient could not be reduced in the memory where autograd left it. Python's names: kCopyReasons.
enum class CopyReason : uint8_t {
  SharedStorage,  // something else holds the memory, and might still read it in this backward
  Layout,         // strides are not the parameter's: ranks would disagree on the order of elements; or a lazy conj()
  Graph,          // part of a graph (create_graph=True)
  Small,          // less than a page, in a bucket that is otherwise reduced in place
  Unused,         // no gradient here: zeros, or what an earlier backward left, stand in
  CommHook,       // a communication hook gets the bucket's gradients in one piece
  Compression,    // what travels is of another dtype
  Bucket,         // on a device buckets are flat
};
inline constexpr std::array kCopyReasons{"shared storage", "layout",    "graph",       "small",
                                         "unused",         "comm hook", "compression", "bucket"};

// The reason why a gradient is staged in a slot: peers can't reach its memory, or can't reduce it as it lies there.
enum class StageReason : uint8_t {
  Setting,      // gradient_memory="torch", or an engine without a pool
  Numerics,     // "ring" scales before it adds
  Compression,  // what travels is of another dtype
  Shortage,     // the pool could not grow, and says why
  Elsewhere,    // in memory that autograd did not get from the pool
};
inline constexpr std::array kStageReasons{"setting", "numerics", "compression", "shortage", "elsewhere"};

// The bytes that the last synchronized backward moved.
struct Statistics {
  uint64_t backwards = 0;  // synchronized so far; everything below is about the last one
  uint64_t buckets = 0;
  uint64_t reduced_bytes = 0;
  std::array<uint64_t, kCopyReasons.size()> copied_bytes{};
  std::array<uint64_t, kStageReasons.size()> staged_bytes{};  // of this rank's; a bucket is staged with any of them

  void count_staged(StageReason reason, size_t bytes) { staged_bytes[static_cast<size_t>(reason)] += bytes; }
  void count_copy(CopyReason reason, size_t bytes) { copied_bytes[static_cast<size_t>(reason)] += bytes; }
};

// Limits the warnings of steps that are not finite: gives the first in full, then at most one in 100 steps, with the
// number of such steps since. Once weights are NaN every step brings NaN, and the first warning is the one that helps.
class NonfiniteWarnings {
 public:
  // The warning of `step`, which `text` describes; empty if the step is only counted.
  std::string next(uint64_t step, const std::string& text) {
    ++counted_;
    if (warned_ != 0 && step - warned_ < kApart) return "";
    std::string warning = text;
    if (warned_ != 0) {
      warning = std::to_string(counted_) + " of the last " + std::to_string(step - warned_) +
                " steps were not finite; in the last one " + text;
    }
    warned_ = step;
    counted_ = 0;
    return warning;
  }

 private:
  static constexpr uint64_t kApart = 100;

  uint64_t warned_ = 0;   // the last step with a warning, or 0
  uint64_t counted_ = 0;  // steps since then that were not finite
};

struct Record {
  Statistics statistics = {};
  // The times of the last steps, which Python may hold longer than the model lives.
  const std::shared_ptr<StepTimes> step_times = std::make_shared<StepTimes>();
  // Parameters in the order in which the last backward brought them, without those that it did not bring.
  std::vector<size_t> ready_order = {};
  // Whether each backward so far has brought the same gradients on this rank.
  bool graph_is_static = true;

  NonfiniteWarnings nonfinite_warnings = {};

  // This rank's own times in the last step, packed by pack_stamp() for the other ranks; 0 if there are none.
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
    event.kind = trace::Kind::Copy;
    event.begin = step_.end;
    auto copied = [&](const char* how, const auto& reasons, const auto& bytes) {
      for (size_t i = 0; i < bytes.size(); ++i) {
        if (bytes[i] == 0) continue;
        event.detail = bytes[i];
        event.text = trace::text(std::string(how) + reasons[i]);
        trace::record(event);
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
