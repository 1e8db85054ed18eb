#include "collectives/order.h"

#include "base/alignment.h"

namespace syncengine {

namespace {

constexpr size_t kGlooSegment = 1 << 20;

}  // namespace

RingCut ring_cut(size_t bytes, size_t element, int world) {
  size_t ranks = static_cast<size_t>(world);
  size_t segments = round_up(std::max((bytes + kGlooSegment - 1) / kGlooSegment, 2 * ranks), ranks);
  size_t segment = round_up((bytes + segments - 1) / segments, element);
  return {std::max(segments / ranks * segment, element)};
}

void ring_order(int chunk, int world, std::vector<int>& order) {
  order.clear();
  for (int hop = 1; hop <= world; ++hop) order.push_back((chunk - hop + 2 * world) % world);
}

}  // namespace syncengine
