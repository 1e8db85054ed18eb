// Settings of an engine. `numerics` (compared when ranks connect) and the algorithms are the same on all ranks.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include "base/deadline.h"
#include "collectives/interhost_plan.h"
#include "collectives/operation.h"

namespace syncengine {

enum class Algorithm : uint8_t {
  Auto,     // direct where every rank's tensor lies in its arena, one_shot for small messages, else staged
  Direct,   // direct where possible at any size, else staged
  Staged,   // always through the staging slots
  OneShot,  // always everybody reduces everything
};

// The memory in which autograd's gradients lie while a synchronized backward runs.
enum class GradientMemory : uint8_t {
  Arena,  // in a pool in the arena: the owner of a slice reads and writes all ranks' gradients in place
  Torch,  // wherever torch puts them, so that they are staged
};

struct Options {
  Numerics numerics = Numerics::RankOrder;
  Algorithm algorithm = Algorithm::Auto;
  HostAlgorithm host_algorithm = HostAlgorithm::Auto;
  Duration timeout = seconds(1800);
  std::string timeout_call = "init(timeout=...)";  // what sets it, for errors: a call, or several
  Duration log_after = seconds(5);                 // one line on stderr about who is missing
  GradientMemory gradient_memory = GradientMemory::Arena;
  size_t arena_bytes = 0;  // addresses for this rank's arena; 0: shm::default_arena_bytes
};

}  // namespace syncengine
