// The slots of announced collectives that this rank holds on one communicator (communicator.h, reserve_slots).
//
// Ownership: whoever announces shares a `Slots`, and so does each of its announcements until it has ended; the last one
// gives the slots back, on this rank alone, and nobody is told: ranks see it when they next look for a gap together.
// Their counts stay, so who holds a slot next goes on counting. Thread-safety: any thread; nothing blocks.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>

namespace syncengine {

class SlotTable;

// A run of slots.
class Slots {
 public:
  Slots(std::shared_ptr<SlotTable> table, uint64_t first) : table_(std::move(table)), first_(first) {}
  ~Slots();
  Slots(const Slots&) = delete;
  Slots& operator=(const Slots&) = delete;

  uint64_t first() const { return first_; }

 private:
  const std::shared_ptr<SlotTable> table_;
  const uint64_t first_;
};

class SlotTable : public std::enable_shared_from_this<SlotTable> {
 public:
  explicit SlotTable(uint64_t size) : size_(size) {}

  // Where the first `count` neighbors begin, at or after `from`, that this rank does not hold; `size` if there are
  // none.
  uint64_t gap(uint64_t from, size_t count) const;
  uint64_t size() const { return size_; }
  // Null if some of them are held.
  std::shared_ptr<const Slots> take(uint64_t first, size_t count);

 private:
  friend Slots;
  void give_back(uint64_t first);

  const uint64_t size_;
  mutable std::mutex mutex_;
  std::map<uint64_t, uint64_t> held_;  // first slot and the one behind the last
};

}  // namespace syncengine
