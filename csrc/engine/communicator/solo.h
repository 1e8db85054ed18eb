// The communicator of a job with one rank: every collective is a copy or nothing. No thread, no arena, no hook.
#pragma once

#include <memory>

#include "engine/communicator/communicator.h"
#include "engine/progress/options.h"

namespace syncengine {

std::shared_ptr<Communicator> make_solo_communicator(const Options& options);

}  // namespace syncengine
