#include "collectives/order.h"

#include <bit>
#include <map>
#include <string>

#include "base/error.h"
#include "base/memory.h"

namespace syncengine {

RingCut ring_cut(size_t bytes, size_t element, int world) {
  constexpr size_t kGlooSegment = 1 << 20;
  size_t ranks = static_cast<size_t>(world);
  size_t segments = round_up(std::max((bytes + kGlooSegment - 1) / kGlooSegment, 2 * ranks), ranks);
  size_t segment = round_up((bytes + segments - 1) / segments, element);
  return {std::max(segments / ranks * segment, element)};
}

void ring_order(int chunk, int world, std::vector<int>& order) {
  order.clear();
  for (int hop = 1; hop <= world; ++hop) order.push_back((chunk - hop + 2 * world) % world);
}

TreeCut cut_tree(uint32_t leaves, int ranks) {
  if (leaves < static_cast<uint32_t>(ranks)) {
    throw Error(ErrorKind::InvalidUsage, std::to_string(leaves) + " micro-batches are too few for " +
                                             std::to_string(ranks) + " ranks: each needs one");
  }
  using Node = std::pair<uint32_t, uint32_t>;
  auto size = [](const Node& node) { return node.second - node.first; };
  auto middle = [&](const Node& node) { return node.first + std::bit_floor(size(node) - 1); };
  std::vector<Node> nodes{{0, leaves}};
  while (nodes.size() < static_cast<size_t>(ranks)) {
    auto largest =
        std::max_element(nodes.rbegin(), nodes.rend(), [&](const Node& a, const Node& b) { return size(a) < size(b); });
    const Node right{middle(*largest), largest->second};
    largest->second = right.first;
    nodes.insert(largest.base(), right);
  }
  TreeCut cut;
  auto walk = [&](auto& self, const Node& node) -> void {
    if (node == nodes[cut.begins.size()]) {
      cut.begins.push_back(node.first);
      cut.merges.push_back(0);
      return;
    }
    self(self, {node.first, middle(node)});
    self(self, {middle(node), node.second});
    ++cut.merges.back();
  };
  walk(walk, {0, leaves});
  cut.begins.push_back(leaves);
  return cut;
}

Placement::Placement(int own_rank, const std::vector<int>& labels)
    : rank(own_rank), size(static_cast<int>(labels.size())) {
  std::map<int, int> numbers;
  for (int member = 0; member < size; ++member) {
    int number = numbers.try_emplace(labels[member], static_cast<int>(numbers.size())).first->second;
    if (number == hosts()) members.emplace_back();
    contiguous &= members[number].empty() || members[number].back() == member - 1;
    members[number].push_back(member);
    host_of.push_back(number);
    stripes = std::max(stripes, static_cast<int>(members[number].size()));
  }
  host = host_of[rank];
}

}  // namespace syncengine
