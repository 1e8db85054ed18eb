// How an engine behaves. The same on every rank of a job; checked when ranks connect.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include "base/deadline.h"
#include "base/error.h"
#include "collectives/operation.h"

namespace syncengine {

enum class Algorithm : uint8_t {
  Auto,     // direct where every rank's tensor lies in its arena, one_shot for small messages, else staged
  Direct,   // direct where possible at any size, else staged
  Staged,   // always through the staging slots
  OneShot,  // always everybody reduces everything
};

// Where autograd's gradients lie while a synchronized backward runs. An experiment: see docs/gradient_memory.md.
enum class GradientMemory : uint8_t {
  Torch,         // wherever torch's allocator puts them; staged
  Arena,         // in the arena; the owner of a slice reads and writes all ranks' gradients
  ArenaPull,     // in the arena; ranks only read each other's gradients
  Recycled,      // in private memory whose pages are kept; staged
  RecycledHuge,  // the same in huge pages
};

// From its name in lower case. Throws InvalidUsage.
inline GradientMemory gradient_memory_of(const std::string& name) {
  const char* names[] = {"torch", "arena", "arena_pull", "recycled", "recycled_huge"};
  for (int i = 0; i < 5; ++i)
    if (name == names[i]) return static_cast<GradientMemory>(i);
  throw Error(ErrorKind::InvalidUsage, "gradient_memory='" + name + "' is unknown");
}

struct Options {
  Numerics numerics = Numerics::RankOrder;
  Algorithm algorithm = Algorithm::Auto;
  Duration timeout = seconds(1800);
  Duration log_after = seconds(5);  // one line on stderr about who is missing
  GradientMemory gradient_memory = GradientMemory::Torch;
  size_t arena_bytes = 0;  // address space of this rank's arena; 0: the machine's memory
};

}  // namespace syncengine
