// The order in which the ranks' contributions to an element are added.
#pragma once

#include <algorithm>
#include <cstddef>
#include <vector>

#include "collectives/operation.h"
#include "kernels/reduce.h"

namespace syncengine {

// The cut that Gloo's ring all-reduce makes of a buffer, one chunk a rank (derived from gloo/allreduce.cc): chunk c
// covers [c * chunk, (c + 1) * chunk) of `bytes`, and is summed as g[c] + (g[c+1] + (... + g[c-1])).
struct RingCut {
  size_t chunk;  // bytes, a multiple of the element size
  int chunk_of(size_t offset) const { return static_cast<int>(offset / chunk); }
};
RingCut ring_cut(size_t bytes, size_t element, int world);

// The ranks in the order in which ring chunk c is added: c-1, c-2, ..., c (mod world).
void ring_order(int chunk, int world, std::vector<int>& order);

// A binary tree over leaves (micro-batches), cut into one node for each rank. The left part of a node with n leaves has
// as many as the largest power of two below n; the right part has the rest. The tree is cut by splitting the largest
// node, of equally large ones the last, until there are as many nodes as ranks. Rank r contributes the sum of the
// leaves of node r.
struct TreeCut {
  std::vector<uint32_t> begins;  // the first leaf of each rank, then the number of all leaves
  // By node: how many times the top two entries of a stack are replaced by their sum when the node has been pushed.
  std::vector<uint8_t> merges;
};
// Throws InvalidUsage if there are fewer leaves than ranks.
TreeCut cut_tree(uint32_t leaves, int ranks);

// Caches cut_tree().merges for a caller that uses one tree again and again. Thread-safety: none.
class TreeMerges {
 public:
  const std::vector<uint8_t>& of(uint32_t leaves, int ranks) {
    if (leaves != leaves_) merges_ = cut_tree(leaves, ranks).merges;
    leaves_ = leaves;
    return merges_;
  }

 private:
  uint32_t leaves_ = 0;
  std::vector<uint8_t> merges_;
};

inline kernels::Rounding rounding_of(Numerics numerics) {
  const bool hops = numerics == Numerics::Ring || numerics == Numerics::Tree;
  return hops ? kernels::Rounding::EveryHop : kernels::Rounding::Once;
}

// Which ranks of a communicator live on which host, and which rank of a host works for the whole host. Hosts are
// numbered by their lowest ranks. Work that a whole host does is cut into stripes, as many as the largest host has
// ranks: the same global ranges of elements on every host, so that hosts of different sizes fit each other.
//
// Ownership: plain data. Thread-safety: constant after construction. Failure: none.
struct Placement {
  // `labels` are by rank, equal for two ranks if and only if they share memory.
  Placement(int own_rank, const std::vector<int>& labels);

  int rank;
  int size;
  int host;                               // this rank's
  std::vector<int> host_of;               // by rank
  std::vector<std::vector<int>> members;  // by host: its ranks, ascending
  int stripes = 0;
  bool contiguous = true;  // the ranks of a host follow each other

  int hosts() const { return static_cast<int>(members.size()); }
  const std::vector<int>& locals() const { return members[host]; }
  // The rank that handles stripe `stripe` on host `on`.
  int handler(int on, int stripe) const {
    const auto& ranks = members[on];
    return ranks[static_cast<size_t>(stripe) * ranks.size() / stripes];
  }
  // The place of rank `of_rank` among the ranks of its host.
  int local_index(int of_rank) const {
    const auto& ranks = members[host_of[of_rank]];
    return static_cast<int>(std::lower_bound(ranks.begin(), ranks.end(), of_rank) - ranks.begin());
  }
};

}  // namespace syncengine
