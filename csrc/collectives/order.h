// In which order the ranks' contributions to an element are added.
#pragma once

#include <cstddef>
#include <vector>

#include "collectives/operation.h"

namespace syncengine {

// How Gloo's ring all-reduce cuts a buffer into one chunk a rank (derived from gloo/allreduce.cc):
// chunk c covers [c * chunk, (c + 1) * chunk) of `bytes`, and is summed as g[c] + (g[c+1] + (... + g[c-1])).
struct RingCut {
  size_t chunk;  // bytes, a multiple of the element size
  int chunk_of(size_t offset) const { return static_cast<int>(offset / chunk); }
};
RingCut ring_cut(size_t bytes, size_t element, int world);

// The ranks in the order in which ring chunk c is added: c-1, c-2, ..., c (mod world).
void ring_order(int chunk, int world, std::vector<int>& order);

}  // namespace syncengine
