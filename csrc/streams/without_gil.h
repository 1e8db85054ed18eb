// A scope without the GIL, for what may be called with it or without, also where Python has ended.
#pragma once

#include <torch/csrc/utils/pybind.h>

#include <optional>

namespace syncengine {

// Code that waits for another thread begins with one: where that thread drops a tensor, torch may wait for the GIL.
struct WithoutGil {
  WithoutGil() {
    if (Py_IsInitialized() && PyGILState_Check()) released.emplace();
  }
  std::optional<pybind11::gil_scoped_release> released;
};

}  // namespace syncengine
