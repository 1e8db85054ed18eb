// Ownership: whoever announces shares a `Slots`, and so does each of its announcements until it has ended. The last of
// them gives the slots back, on this rank alone; other ranks find that out when they next look for a gap together.
// Thread-safety: any thread; nothing blocks.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>

namespace syncengine {

// A run of announcement slots, held for one model. The model's own slots come first. The last ones serve steps that a
// rank refuses: one for the operation that ends such a step, and words where that rank stores the step and the reason.
class Slots {
 public:
  static constexpr size_t kTextWords = 126;
  static constexpr size_t kBehind = 2 + kTextWords;

  Slots(uint64_t first, size_t count, uint64_t base) : first_(first), behind_(first + count - kBehind), base_(base) {}

  uint64_t first() const { return first_; }
  // The slot of the operation that ends a refused step.
  uint64_t end_slot() const { return behind_; }
  // Where a member's last refused step is stored, and its reason: text up to a zero, or as long as all of its words.
  uint64_t refused_word() const { return behind_ + 1; }
  uint64_t text_words() const { return behind_ + 2; }

  // The number that stands for the holder's `step` in shared memory. All ranks count steps alike, from 1.
  uint64_t number(uint64_t step) const { return base_ + step; }
  uint64_t base() const { return base_; }

 private:
  const uint64_t first_, behind_, base_;
};

class SlotTable : public std::enable_shared_from_this<SlotTable> {
 public:
  explicit SlotTable(uint64_t size) : size_(size) {}

  // The first of `count` consecutive slots, at or after `from`, that this rank does not hold; `size` if there are none.
  uint64_t gap(uint64_t from, size_t count) const;
  uint64_t size() const { return size_; }
  // One more than the last slot that was ever taken.
  uint64_t end() const {
    std::lock_guard lock(mutex_);
    return end_;
  }
  // Takes a run of slots; null if some of them are held. The holder's first step gets the number `base` + 1.
  std::shared_ptr<const Slots> take(uint64_t first, size_t count, uint64_t base = 0);

 private:
  const uint64_t size_;
  mutable std::mutex mutex_;
  std::map<uint64_t, uint64_t> held_;  // the first slot of each run, and the end of the run
  uint64_t end_ = 0;
};

}  // namespace syncengine
