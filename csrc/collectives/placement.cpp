#include "collectives/placement.h"

#include <map>

namespace syncengine {

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
