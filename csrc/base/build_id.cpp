#include "base/build_id.h"

#include <cstdio>

#ifndef SYNCENGINE_BUILD_ID
#error "SYNCENGINE_BUILD_ID is made by setup.py and tests/core/Makefile"
#endif

namespace syncengine {

uint64_t build_id() { return SYNCENGINE_BUILD_ID; }

std::string build_text(uint64_t build) {
  char text[17];
  std::snprintf(text, sizeof(text), "%016llx", static_cast<unsigned long long>(build));
  return text;
}

}  // namespace syncengine
