#include "base/build_id.h"

namespace syncengine {

uint64_t build_id() { return SYNCENGINE_BUILD_ID; }

}  // namespace syncengine
