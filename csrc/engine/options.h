// How an engine behaves. The same on every rank of a job; checked when ranks connect.
#pragma once

#include <cstddef>
#include <cstdint>

#include "base/deadline.h"
#include "collectives/operation.h"

namespace syncengine {

enum class Algorithm : uint8_t {
  Auto,     // direct where every rank's tensor lies in its arena, one_shot for small messages, else staged
  Direct,   // direct where possible at any size, else staged
  Staged,   // always through the staging slots
  OneShot,  // always everybody reduces everything
};

struct Options {
  Numerics numerics = Numerics::RankOrder;
  Algorithm algorithm = Algorithm::Auto;
  Duration timeout = seconds(1800);
  Duration log_after = seconds(5);  // one line on stderr about who is missing
  size_t arena_bytes = 0;           // address space of this rank's arena; 0: the machine's memory
};

}  // namespace syncengine
