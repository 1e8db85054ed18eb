// A half-open range of offsets.
#pragma once

#include <cstddef>

namespace syncengine {

struct Range {
  size_t begin = 0, end = 0;
  size_t bytes() const { return end - begin; }
};

}  // namespace syncengine
