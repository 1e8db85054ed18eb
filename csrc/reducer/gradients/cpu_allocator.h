// Puts the gradients that autograd allocates while a synchronized backward runs into a pool, so that they lie where
// peers reach them.
//
// torch's CPU allocator is replaced for good by one that passes everything on, except allocations of a gradient's exact
// size made by a thread that uses a grant, while that is valid: a backward's own threads, until it ends. Of those, what
// is known to be a temporary (AllocationHabits) is passed on, too. So the pool holds gradients, and thus blocks of few
// sizes, which fit each other's places.
#pragma once

#include <c10/core/Allocator.h>

#include <atomic>
#include <memory>
#include <mutex>
#include <unordered_map>
#include <vector>

#include "reducer/gradients/allocation_habits.h"
#include "transport/shm/pool.h"

namespace syncengine::gradient_memory {

inline constexpr size_t kSmallest =
    4096;  // bytes. Less would share a page with others, and can't be severed from peers

// One backward's permission to allocate gradients from a pool. Thread-safe.
class Grant {
 public:
  // `accumulates`: there were gradients when that backward began.
  Grant(shm::Pool& pool, std::shared_ptr<AllocationHabits> habits, bool accumulates)
      : pool_(pool), habits_(std::move(habits)), accumulates_(accumulates) {}

  bool covers(size_t bytes) const { return habits_->sizes().count(bytes) > 0; }
  // For a size that it covers; null: torch's own memory is to be used.
  void* allocate(size_t bytes);
  // Tells that a block goes back to its pool; it may be another grant's.
  void notice_release(void* block);

  bool is_valid() const { return valid_.load(std::memory_order_relaxed); }
  void revoke() { valid_.store(false, std::memory_order_relaxed); }  // relaxed: a late allocation does no harm
  // The backward has ended well: what it did is remembered for the next ones. To be called after revoke().
  void learn();

 private:
  // Of one size in this backward.
  struct Course {
    std::shared_ptr<const Temporaries> known;
    bool learns = false;
    size_t next = 0;
    Temporaries temporaries = {};  // if it learns
  };

  shm::Pool& pool_;
  const std::shared_ptr<AllocationHabits> habits_;
  const bool accumulates_;
  std::atomic<bool> valid_{true};
  std::mutex mutex_;
  std::unordered_map<size_t, Course> courses_;                          // by size
  std::unordered_map<void*, std::pair<size_t, size_t>> being_learned_;  // blocks: their size, their place in its course
};

// Idempotent; on any thread, while no other thread allocates tensors for the first time.
void install();

// For the calling thread, until it is revoked.
void use(const std::shared_ptr<Grant>& grant);

// True for the memory of a plain tensor: torch's own, or a pool's.
bool is_tensor_memory(const c10::DataPtr& data);

}  // namespace syncengine::gradient_memory
