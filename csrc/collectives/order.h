// In which order the ranks' contributions to an element are added.
#pragma once

#include <algorithm>
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

// Which ranks of a communicator live on which host, and who on a host does what for it.
//
// Ownership: plain data. Thread-safety: constant after construction. Failure: none.

// Hosts are numbered by their lowest ranks. Work that a whole host does is cut into stripes, as many as the largest
// host has ranks: the same global ranges of elements on every host, so that hosts of different sizes fit each other.
struct Placement {
  // `labels`: by rank; equal for two ranks if and only if they share memory.
  Placement(int own_rank, const std::vector<int>& labels);

  int rank;
  int size;
  int host;                               // the own one
  std::vector<int> host_of;               // by rank
  std::vector<std::vector<int>> members;  // by host: its ranks, ascending
  int stripes = 0;
  bool contiguous = true;  // the ranks of a host follow each other

  int hosts() const { return static_cast<int>(members.size()); }
  const std::vector<int>& locals() const { return members[host]; }
  // The rank that does stripe `stripe` on `on`.
  int handler(int on, int stripe) const {
    const auto& ranks = members[on];
    return ranks[static_cast<size_t>(stripe) * ranks.size() / stripes];
  }
  // Its place among the ranks of its host.
  int local_index(int of_rank) const {
    const auto& ranks = members[host_of[of_rank]];
    return static_cast<int>(std::lower_bound(ranks.begin(), ranks.end(), of_rank) - ranks.begin());
  }
};

}  // namespace syncengine
