// A collective cut into smaller ones that fit a slot of pinned memory and give the same bits: pure functions of rank
// and size.
//
// Ownership: none. Thread-safety: reentrant. Failure: none.
#pragma once

#include <cstddef>
#include <vector>

#include "collectives/plan.h"

namespace syncengine::cuda {

// Offsets are bytes; `user` of a copy counts into the operation's spans, `slot` into the piece's memory. Input and
// output lie in that memory too: the collective's own, in place where they are equal.
struct Piece {
  std::vector<Copy> in, out;  // own memory -> slot before, slot -> own memory behind
  size_t input = 0, input_bytes = 0;
  size_t output = 0, output_bytes = 0;
};

// At least one. `slot_bytes`: at least 64 for each rank and 64 more. An operation without bytes is one empty piece.
std::vector<Piece> cut(const Operation& operation, int rank, int world, size_t slot_bytes);

}  // namespace syncengine::cuda
