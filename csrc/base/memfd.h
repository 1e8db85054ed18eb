// Memory without a name that processes share by passing its descriptor on: of a fixed size, never executable.
#pragma once

#include <cstddef>

#include "base/fd.h"

namespace syncengine {

// Sealed against growing, shrinking and other seals; close-on-exec; zeros. `name` is what /proc shows. Throws
// InvalidUsage with `hint` behind what failed for want of room.
UniqueFd create_sealed_memfd(const char* name, size_t bytes, const char* hint = "");

// Whether `fd` is such memory: its size will stay what it is.
bool has_fixed_size(int fd);

}  // namespace syncengine
