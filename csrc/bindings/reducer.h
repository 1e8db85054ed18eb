#pragma once

#include <torch/csrc/utils/pybind.h>

namespace syncengine {

void bind_reducer(pybind11::module_& module);

}  // namespace syncengine
