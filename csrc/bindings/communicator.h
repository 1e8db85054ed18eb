// How Python holds communicators.
#pragma once

#include <memory>

#include "engine/communicator.h"

namespace syncengine {

// The same communicator, but whoever drops the last reference does so without the GIL: that ends the engine's thread, which may
// be waiting for the GIL itself.
std::shared_ptr<Communicator> for_python(std::shared_ptr<Communicator> communicator);

}  // namespace syncengine
