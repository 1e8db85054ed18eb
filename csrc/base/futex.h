// The kernel's wait-on-address, shared between processes. Spurious returns are allowed; callers re-check.
#pragma once

#include <atomic>
#include <cstdint>

#include "base/deadline.h"

namespace syncengine {

// Returns when woken, when `word` differs from `expected`, after `timeout`, or on a signal.
void futex_wait(const std::atomic<uint32_t>& word, uint32_t expected, Duration timeout);
void futex_wake_all(const std::atomic<uint32_t>& word);

// One polite turn of a short busy wait.
inline void cpu_pause() {
#if defined(__x86_64__) || defined(__i386__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

}  // namespace syncengine
