// What Python holds of an asynchronous collective, on CPU or CUDA tensors.
#pragma once

#include <pybind11/pybind11.h>

#include <optional>

namespace syncengine {

class PyWork {
 public:
  virtual ~PyWork() = default;
  virtual void wait(std::optional<double> timeout) = 0;
  virtual bool is_completed() const = 0;
  virtual pybind11::object exception() const = 0;
};

}  // namespace syncengine
