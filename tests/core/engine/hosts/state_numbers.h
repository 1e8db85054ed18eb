// Numbers the states of a walk in the order in which they come, millions of them.
//
// Thread-safety: one thread. Failure: none.
#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <type_traits>
#include <utility>
#include <vector>

namespace syncengine::succession_walk {

// The states themselves are not kept, but their hashes, in one array: most look-ups then read memory once.
template <class State>
class StateNumbers {
 public:
  // The state's number, and whether the state is a new one.
  std::pair<int, bool> number(const State& state) {
    if (2 * count_ == slots_.size()) {
      for (const Slot& old : std::exchange(slots_, std::vector<Slot>(2 * slots_.size())))
        if (old.number >= 0) find(old.hash) = old;
    }
    const Hash hash = hash_of(state);
    Slot& slot = find(hash);
    const bool is_new = slot.number < 0;
    if (is_new) slot = {hash, static_cast<int>(count_++)};
    return {slot.number, is_new};
  }
  size_t size() const { return count_; }

 private:
  struct Hash {  // two states have the same one once in 2^80 walks
    uint64_t first, second;
    bool operator==(const Hash&) const = default;
  };
  struct Slot {
    Hash hash{};
    int number = -1;
  };

  static Hash hash_of(const State& state) {
    static_assert(std::has_unique_object_representations_v<State> && sizeof(State) % sizeof(uint64_t) == 0);
    uint64_t words[sizeof(State) / sizeof(uint64_t)];
    std::memcpy(words, &state, sizeof(state));
    Hash hash{0xcbf29ce484222325, 0x9e3779b97f4a7c15};
    for (uint64_t word : words) {
      hash.first = std::rotl((hash.first ^ word) * 0xff51afd7ed558ccd, 31);
      hash.second = std::rotl((hash.second + word) * 0xc4ceb9fe1a85ec53, 29) ^ hash.first;
    }
    return hash;
  }
  Slot& find(const Hash& hash) {
    size_t at = hash.first & (slots_.size() - 1);
    while (slots_[at].number >= 0 && slots_[at].hash != hash) at = (at + 1) & (slots_.size() - 1);
    return slots_[at];
  }

  std::vector<Slot> slots_ = std::vector<Slot>(1024);
  size_t count_ = 0;
};

}  // namespace syncengine::succession_walk
