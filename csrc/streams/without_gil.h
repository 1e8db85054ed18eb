// A scope without the GIL, in functions whose callers may hold the GIL or not, also after Python has ended.
#pragma once

#include <torch/csrc/utils/pybind.h>

#include <optional>

namespace syncengine {

// A function that waits for another thread begins with this scope: that thread may drop a tensor, and torch may wait
// for the GIL there.
struct WithoutGil {
  WithoutGil() {
    if (Py_IsInitialized() && PyGILState_Check()) released.emplace();
  }
  std::optional<pybind11::gil_scoped_release> released;
};

}  // namespace syncengine
