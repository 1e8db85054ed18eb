// Rows in torch's profiler, as c10d makes them for the works of its own backends: "syncengine:all_reduce".
//
// Ownership: movable; the row ends with the object, if not before. Thread-safety: begins on the caller's thread, may
// end on any other; not both at once. Aliasing: keeps none of the tensors. Failure: none. Costs: a few instructions if
// no profiler runs.
#pragma once

#include <ATen/ThreadLocalState.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>
#include <ATen/record_function.h>

#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

namespace syncengine {

class ProfilerRow {
 public:
  ProfilerRow() = default;
  // The row is named "syncengine:" and `name`, or what the function `name` returns. Shapes of the inputs are recorded
  // if the profiler asks for them.
  ProfilerRow(const auto& name, at::ArrayRef<at::Tensor> inputs) {
    auto steps = at::getStepCallbacksUnlessEmpty(at::RecordScope::USER_SCOPE);
    if (C10_LIKELY(!steps.has_value())) return;
    if constexpr (requires { name(); })
      begin(std::move(*steps), name(), inputs);
    else
      begin(std::move(*steps), name, inputs);
  }
  ProfilerRow(ProfilerRow&&) noexcept = default;
  ProfilerRow& operator=(ProfilerRow&&) noexcept = default;
  ~ProfilerRow() { end(); }

  void end() {
    if (C10_UNLIKELY(end_ != nullptr)) (*std::exchange(end_, nullptr))();
  }

 private:
  void begin(at::StepCallbacks&& steps, const std::string& name, at::ArrayRef<at::Tensor> inputs) {
    auto record = std::make_shared<at::RecordFunction>(std::move(steps));
    record->_setAsync();  // it may end on another thread
    std::vector<c10::IValue> values;
    if (record->needsInputs()) values.assign(inputs.begin(), inputs.end());
    record->before("syncengine:" + name, c10::ArrayRef<const c10::IValue>(values.data(), values.size()));
    // Profilers find out by thread-local state for whom a row is recorded, so the end takes this thread's along.
    end_ = std::make_unique<std::function<void()>>(at::wrapPropagateTLSState([record] { record->end(); }));
  }

  std::unique_ptr<std::function<void()>> end_;
};

}  // namespace syncengine
