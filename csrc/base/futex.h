// The kernel's wait-on-address, shared between processes. Spurious returns are allowed; callers re-check.
#pragma once

#include <atomic>
#include <cstdint>

#include "base/deadline.h"
#include "base/processor.h"

namespace syncengine {

// Returns when woken, when `word` differs from `expected`, after `timeout`, or on a signal.
void futex_wait(const std::atomic<uint32_t>& word, uint32_t expected, Duration timeout);
void futex_wake_all(const std::atomic<uint32_t>& word);

// One polite turn of a short busy wait.
inline void cpu_pause() {
#if SYNCENGINE_X86_64
  __builtin_ia32_pause();
#elif SYNCENGINE_AARCH64
  asm volatile("yield");
#endif
}

}  // namespace syncengine
