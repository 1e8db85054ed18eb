#include "base/build_id.h"

#ifndef SYNCENGINE_BUILD_ID
#error "SYNCENGINE_BUILD_ID is made by setup.py and tests/core/Makefile"
#endif

namespace syncengine {

uint64_t build_id() { return SYNCENGINE_BUILD_ID; }

}  // namespace syncengine
