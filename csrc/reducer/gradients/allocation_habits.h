// What backward does with blocks of a gradient's size: some are gradients, others are temporaries, which need not lie
// where peers reach them. A convolution makes two of its weight's size for each gradient, which would make the pool
// twice as large.
//
// Learned from one backward: the n-th block of a size is a temporary if it was gone when that backward ended. One that
// starts with gradients (it accumulates) has habits of its own. A wrong guess costs a staged gradient, never its value;
// it is forgotten, and after a few nothing is guessed about that size any more.
//
// Thread-safety: any thread. Failure: none.
#pragma once

#include <array>
#include <cstddef>
#include <memory>
#include <mutex>
#include <unordered_map>
#include <unordered_set>
#include <vector>

namespace syncengine::gradient_memory {

// Bytes of the gradients that belong into the pool.
using Sizes = std::unordered_set<size_t>;

// By place among a backward's allocations of one size.
using Temporaries = std::vector<bool>;

class AllocationHabits {
 public:
  explicit AllocationHabits(Sizes sizes) : sizes_(std::move(sizes)) {}

  const Sizes& sizes() const { return sizes_; }

  // What is known about blocks of `bytes`, which is one of sizes(); null if nothing is.
  std::shared_ptr<const Temporaries> known(size_t bytes, bool accumulates) const;
  bool wants_to_learn(size_t bytes, bool accumulates) const;
  void learn(size_t bytes, bool accumulates, Temporaries temporaries);
  // A gradient of that size did not get a block of the pool.
  void forget(size_t bytes);

 private:
  struct Habit {
    std::array<std::shared_ptr<const Temporaries>, 2> temporaries;  // by `accumulates`
    int wrong = 0;                                                  // guesses
  };

  const Sizes sizes_;
  mutable std::mutex mutex_;
  std::unordered_map<size_t, Habit> habits_;
};

}  // namespace syncengine::gradient_memory
