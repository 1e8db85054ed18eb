#include "reducer/torch/profile.h"

#include <ATen/ThreadLocalState.h>
#include <ATen/core/ivalue.h>

#include <string>
#include <vector>

namespace syncengine {

void ProfilerRow::begin(at::StepCallbacks&& steps, const std::string& name, at::ArrayRef<at::Tensor> inputs) {
  auto record = std::make_shared<at::RecordFunction>(std::move(steps));
  record->_setAsync();  // it may end on another thread
  std::vector<c10::IValue> values;
  if (record->needsInputs()) values.assign(inputs.begin(), inputs.end());
  record->before("syncengine:" + name, c10::ArrayRef<const c10::IValue>(values.data(), values.size()));
  // Profilers know whom they profile by thread.
  end_ = std::make_unique<std::function<void()>>(at::wrapPropagateTLSState([record] { record->end(); }));
}

}  // namespace syncengine
