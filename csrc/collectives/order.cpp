
#include "collectives/order.h"

#include <map>

#include "base/memory.h"

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
