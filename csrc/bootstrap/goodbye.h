// How a rank ended connecting, for the ranks that have its memory and still wait for another one's.
#pragma once

#include <cstdint>

#include "base/error.h"

namespace syncengine {

struct Goodbye {
  int32_t failed = 0;
  ErrorKind kind = ErrorKind::Aborted;
  char text[248] = {};
};

}  // namespace syncengine
