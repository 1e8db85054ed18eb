#include "transport/matching/shared.h"

#include <iterator>

namespace syncengine::matching {

bool Withdrawals::is_withdrawn(uint64_t tag) const {
  auto next = ranges_.upper_bound(tag);
  if (next == ranges_.begin()) return false;
  const TagRange& range = std::prev(next)->second;
  return range.here && tag <= range.last;
}

bool Withdrawals::is_over(const TagRange& range) const {
  return range.here && range.there && static_cast<int32_t>(eagers_ - range.eagers) >= 0;
}

void Withdrawals::withdraw(uint64_t first, uint64_t last) {
  TagRange& range = ranges_[first];
  range.last = last;
  range.here = true;
  if (is_over(range))
    ranges_.erase(first);
  else
    awaited_ += range.there;
}

void Withdrawals::hear(const Frame& frame) {
  constexpr size_t kMostRanges = 1 << 12;
  if (ranges_.size() >= kMostRanges && !ranges_.contains(frame.tag))
    throw garbage(shared_, peer_, "more withdrawals than can be");
  TagRange& range = ranges_[frame.tag];
  if (range.there || (range.here && range.last != frame.handle)) throw garbage(shared_, peer_, "one withdrawal twice");
  range.last = frame.handle;
  range.there = true;
  range.eagers = frame.size;
  if (is_over(range))
    ranges_.erase(frame.tag);
  else
    awaited_ += range.here;
}

void Withdrawals::count_eager() {
  ++eagers_;
  if (awaited_ > 0) awaited_ -= std::erase_if(ranges_, [&](const auto& item) { return is_over(item.second); });
}

}  // namespace syncengine::matching
