#include "engine/lanes/slots.h"

namespace syncengine {

Slots::~Slots() { table_->give_back(first_); }

uint64_t SlotTable::gap(uint64_t from, size_t count) const {
  std::lock_guard lock(mutex_);
  auto next = held_.upper_bound(from);
  if (next != held_.begin()) --next;
  for (; next != held_.end() && next->first < from + count; ++next) {
    if (next->second > from) from = next->second;
  }
  return count <= size_ && from <= size_ - count ? from : size_;
}

std::shared_ptr<const Slots> SlotTable::take(uint64_t first, size_t count) {
  if (first == size_ || gap(first, count) != first) return nullptr;
  std::lock_guard lock(mutex_);
  held_.emplace(first, first + count);
  return std::make_shared<const Slots>(shared_from_this(), first);
}

void SlotTable::give_back(uint64_t first) {
  std::lock_guard lock(mutex_);
  held_.erase(first);
}

}  // namespace syncengine
