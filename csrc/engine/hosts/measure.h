// How fast the links between hosts are, measured when a job starts: a few short messages, then longer ones until one
// takes 5 ms or has 4 MiB. On a link of 1 Gbit/s some 20 ms in all.
//
// Thread-safety: collective over the communicator, and blocks. Failure: throws what ended the communicator.
#pragma once

#include <functional>

#include "collectives/interhost_choice.h"
#include "engine/communicator/communicator.h"

namespace syncengine::hosts {

// The same on all ranks: that of the slowest link from a host to the next one, all of them used at once.
LinkSpeed measure_links(Communicator& communicator, const Placement& placement,
                        const std::function<void()>& interrupted);

}  // namespace syncengine::hosts
