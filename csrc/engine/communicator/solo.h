// The communicator of a job or group with one rank: every collective is a copy or nothing, and messages go from the
// rank to itself. No thread, no arena, no hook.
#pragma once

#include <memory>

#include "engine/communicator/communicator.h"
#include "engine/progress/options.h"

namespace syncengine {

// `global_rank`: what errors call the rank.
std::shared_ptr<Communicator> make_solo_communicator(const Options& options, int global_rank);

}  // namespace syncengine
