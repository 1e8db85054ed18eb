// Gloo's ring all-reduce (the loop of gloo/allreduce.cc), played with lists of ranks instead of numbers: a second
// statement of which bytes are added in which order. Shares no code with csrc/collectives.
#pragma once

#include <algorithm>
#include <cstddef>
#include <vector>

#include "test.h"

namespace syncengine::testing {

// Bytes [begin, end) are added in `order`: the first two, then the third, and so on.
struct GlooSegment {
  size_t begin, end;
  std::vector<int> order;
};

inline std::vector<GlooSegment> gloo_ring(size_t bytes, size_t element, size_t world) {
  auto round_up = [](size_t value, size_t multiple) { return (value + multiple - 1) / multiple * multiple; };
  const size_t max_segment = element * std::max<size_t>(1, (1 << 20) / element);
  const size_t segments = round_up(std::max((bytes + max_segment - 1) / max_segment, world * 2), world);
  const size_t per_rank = segments / world;
  const size_t segment_bytes = round_up((bytes + segments - 1) / segments, element);

  // held[rank][segment]: whose contributions rank's copy of the segment is the sum of, in the order of addition.
  std::vector<std::vector<std::vector<int>>> held(world, std::vector<std::vector<int>>(segments));
  for (size_t rank = 0; rank < world; ++rank)
    for (auto& ranks : held[rank]) ranks = {static_cast<int>(rank)};

  // In step i a rank sends a segment to the rank before it. What came in step i - 2 is added before step i sends.
  struct Received {
    size_t segment;
    std::vector<int> ranks;
  };
  std::vector<std::vector<Received>> inbox(world);
  const size_t sends = segments - per_rank;
  for (size_t i = 0; i < sends + 2; ++i) {
    for (size_t rank = 0; rank < world && i >= 2; ++rank) {
      const Received& received = inbox[rank][i - 2];
      auto& mine = held[rank][received.segment];
      std::vector<int> sum = received.ranks;
      sum.insert(sum.end(), mine.begin(), mine.end());
      mine = sum;
    }
    for (size_t rank = 0; rank < world && i < sends; ++rank) {
      const size_t segment = ((rank + 1) * per_rank + i) % segments;
      inbox[(rank + world - 1) % world].push_back({segment, held[rank][segment]});
    }
  }

  // Every rank now holds the finished segments of its own chunk.
  std::vector<GlooSegment> result;
  for (size_t segment = 0; segment < segments; ++segment) {
    const size_t begin = segment * segment_bytes, end = std::min(bytes, begin + segment_bytes);
    if (begin >= end) break;
    const auto& order = held[segment / per_rank][segment];
    CHECK_EQ(order.size(), world);
    result.push_back({begin, end, order});
  }
  return result;
}

}  // namespace syncengine::testing
