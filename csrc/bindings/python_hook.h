// A communication hook written in Python, as the reducer calls it.
//
// torch has the same (c10d::PythonCommHook), but crashes on a hook that returns None.
#pragma once

#include <torch/csrc/utils/pybind.h>
#include <torch/csrc/distributed/c10d/comm.hpp>

namespace syncengine {

// Thread-safety: the GIL is taken inside. Failure: Python's exceptions.
class PythonHook final : public c10d::CommHookInterface {
 public:
  PythonHook(pybind11::object state, pybind11::object hook) : state_(std::move(state)), hook_(std::move(hook)) {}
  ~PythonHook() override;

  c10::intrusive_ptr<c10::ivalue::Future> runHook(c10d::GradBucket& bucket) override;
  at::Tensor parseHookResult(const c10::IValue& result) override;

 private:
  pybind11::object state_, hook_;
};

}  // namespace syncengine
