// What has happened in a model's synchronized backwards: for the next plan, and for Python.
//
// Ownership: the model's. Thread-safety: the reducer's lock.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "reducer/backward/step_times.h"
#include "reducer/backward/timeline.h"
#include "reducer/gradients/statistics.h"

namespace syncengine {

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
