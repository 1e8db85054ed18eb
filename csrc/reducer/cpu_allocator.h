// Puts what autograd allocates while a synchronized backward runs into a pool, so that gradients lie where the pool is.
//
// torch's CPU allocator is replaced for good by one that passes everything on, except allocations of at least 4 KiB made by a
// thread between switch_on and switch_off.
#pragma once

#include <c10/core/Allocator.h>

#include "transport/shm/pool.h"

namespace syncengine::gradient_memory {

inline constexpr size_t kSmallest = 4096;  // a page: smaller gradients are copied

// Idempotent; on any thread, while no other thread allocates tensors for the first time.
void install();

// For the calling thread.
void switch_on(shm::Pool* pool);
void switch_off();

// True for the memory of a plain tensor: torch's own, or a pool's.
bool is_tensor_memory(const c10::DataPtr& data);

}  // namespace syncengine::gradient_memory
