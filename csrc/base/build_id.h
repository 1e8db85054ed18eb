// Identifies the build: a hash of the sources that define what lies in shared memory and what goes over the wire, made
// by setup.py and by tests/core/Makefile. Ranks talk only to ranks of the same build (syncengine/connect.py).
#pragma once

#include <cstdint>

namespace syncengine {

uint64_t build_id();

}  // namespace syncengine
