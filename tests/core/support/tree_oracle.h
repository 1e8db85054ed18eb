// The tree over leaves, read naively: an oracle that shares no code with the engine.
#pragma once

#include <cstdint>
#include <iterator>
#include <map>
#include <vector>

namespace syncengine::testing {

// Where the left part of the tree over leaves [begin, end) ends.
inline uint32_t middle(uint32_t begin, uint32_t end) {
  uint32_t half = 1;
  while (half * 2 < end - begin) half *= 2;
  return begin + half;
}

// The largest nodes, the last first, as often split as there are ranks: the end of each by its beginning.
inline std::map<uint32_t, uint32_t> nodes_of_ranks(uint32_t leaves, int ranks) {
  std::map<uint32_t, uint32_t> end_of{{0, leaves}};
  while (static_cast<int>(end_of.size()) < ranks) {
    uint32_t most = 0;
    for (auto [begin, end] : end_of) most = std::max(most, end - begin);
    uint32_t last = 0;
    for (auto [begin, end] : end_of)
      if (end - begin == most) last = begin;
    const uint32_t end = end_of[last], between = middle(last, end);
    end_of[last] = between;
    end_of[between] = end;
  }
  return end_of;
}

// The sum of what each rank contributes, where add(left, right) makes one node of two.
template <class Part, class Add>
Part sum_of_tree(uint32_t leaves, const std::vector<Part>& parts, Add add) {
  const auto end_of = nodes_of_ranks(leaves, static_cast<int>(parts.size()));
  auto sum = [&](auto& self, uint32_t begin, uint32_t end) -> Part {
    const auto node = end_of.find(begin);
    if (node != end_of.end() && node->second == end)
      return parts[static_cast<size_t>(std::distance(end_of.begin(), node))];
    const uint32_t between = middle(begin, end);
    return add(self(self, begin, between), self(self, between, end));
  };
  return sum(sum, 0, leaves);
}

}  // namespace syncengine::testing
