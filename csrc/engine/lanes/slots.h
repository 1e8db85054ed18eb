// The slots of announced collectives that this rank holds on one communicator (communicator.h, reserve_slots).
//
// Each slot is a word in the shared memory of each member: the number of the step in which that member announced the
// slot last. Steps that share memory one after the other have rising numbers: a holder's steps are counted from a base
// that no member has passed.
//
// Ownership: whoever announces shares a `Slots`, and so does each of its announcements until it has ended; the last one
// gives the slots back, on this rank alone, and nobody is told: ranks see it when they next look for a gap together.
// Thread-safety: any thread; nothing blocks.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>

namespace syncengine {

class SlotTable;

// A run of slots. The holder's own come first. The last ones are for steps that a rank refuses: an operation that ends
// such a step, and words of which only the member that refuses is the writer.
class Slots {
 public:
  static constexpr size_t kTextWords = 126;
  static constexpr size_t kBehind = 2 + kTextWords;

  Slots(std::shared_ptr<SlotTable> table, uint64_t first, size_t count, uint64_t base)
      : table_(std::move(table)), first_(first), behind_(first + count - kBehind), base_(base) {}
  ~Slots();
  Slots(const Slots&) = delete;
  Slots& operator=(const Slots&) = delete;

  uint64_t first() const { return first_; }
  // The operation that ends a refused step.
  uint64_t end_slot() const { return behind_; }
  // The last step that a member has refused, and its reason: text up to a zero, or all of the words.
  uint64_t refused_word() const { return behind_ + 1; }
  uint64_t text_words() const { return behind_ + 2; }

  // Of the holder's `step`, which it counts from 1, all ranks alike.
  uint64_t number(uint64_t step) const { return base_ + step; }
  uint64_t base() const { return base_; }

 private:
  const std::shared_ptr<SlotTable> table_;
  const uint64_t first_, behind_, base_;
};

class SlotTable : public std::enable_shared_from_this<SlotTable> {
 public:
  explicit SlotTable(uint64_t size) : size_(size) {}

  // Where the first `count` neighbors begin, at or after `from`, that this rank does not hold; `size` if there are
  // none.
  uint64_t gap(uint64_t from, size_t count) const;
  uint64_t size() const { return size_; }
  // Behind all that were ever taken.
  uint64_t end() const {
    std::lock_guard lock(mutex_);
    return end_;
  }
  // Null if some of them are held. `base`: see Slots.
  std::shared_ptr<const Slots> take(uint64_t first, size_t count, uint64_t base = 0);

 private:
  friend Slots;
  void give_back(uint64_t first);

  const uint64_t size_;
  mutable std::mutex mutex_;
  std::map<uint64_t, uint64_t> held_;  // first slot and the one behind the last
  uint64_t end_ = 0;
};

}  // namespace syncengine
