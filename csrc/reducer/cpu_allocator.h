// Puts what autograd allocates while a synchronized backward runs into a pool, so that gradients lie where peers reach them.
//
// torch's CPU allocator is replaced for good by one that passes everything on, except allocations of a gradient's exact size
// made by a thread that uses a grant, while that is valid: a backward's own threads, until it ends. So backward's temporaries
// stay where they were, and the pool holds blocks of few sizes, which fit each other's places.
#pragma once

#include <c10/core/Allocator.h>

#include <atomic>
#include <memory>
#include <unordered_set>

#include "transport/shm/pool.h"

namespace syncengine::gradient_memory {

inline constexpr size_t kSmallest =
    4096;  // bytes. Less would share a page with others, and can't be severed from peers

// Bytes of the gradients that belong into the pool.
using Sizes = std::unordered_set<size_t>;

// One backward's permission to allocate blocks of `sizes` from a pool. Thread-safe.
class Grant {
 public:
  Grant(shm::Pool& pool, std::shared_ptr<const Sizes> sizes) : pool_(pool), sizes_(std::move(sizes)) {}
  bool covers(size_t bytes) const { return sizes_->count(bytes) > 0; }
  shm::Pool* pool() const { return valid_.load(std::memory_order_relaxed) ? &pool_ : nullptr; }
  void revoke() { valid_.store(false, std::memory_order_relaxed); }  // relaxed: a late allocation does no harm

 private:
  shm::Pool& pool_;
  const std::shared_ptr<const Sizes> sizes_;
  std::atomic<bool> valid_{true};
};

// Idempotent; on any thread, while no other thread allocates tensors for the first time.
void install();

// For the calling thread, until it is revoked.
void use(const std::shared_ptr<const Grant>& grant);

// True for the memory of a plain tensor: torch's own, or a pool's.
bool is_tensor_memory(const c10::DataPtr& data);

}  // namespace syncengine::gradient_memory
