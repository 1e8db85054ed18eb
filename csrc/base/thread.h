// How the engine's threads begin, and how those who own them end.
//
// Thread-safety: concerns the calling thread alone. Failure: none.
#pragma once

#include <atomic>
#include <cstdint>
#include <thread>

#include "base/deadline.h"
#include "base/processor.h"

namespace syncengine {

// Names the calling thread (at most 15 characters), and leaves signals to the program's own threads, but for those of
// its own faults.
void begin_thread(const char* name);

// Deletes `object`, whose destructor waits for `its` thread: elsewhere, if that is the calling one. Which drops what
// operations held, a tensor perhaps: Python may collect garbage there, and the last reference to anything be among it.
template <class Object>
void delete_off(const std::thread& its, Object* object) {
  if (its.get_id() == std::this_thread::get_id())
    std::thread([object] { delete object; }).detach();
  else
    delete object;
}

// The kernel's wait-on-address, shared between processes. Spurious returns are allowed; callers re-check.

// Returns when woken, when `word` differs from `expected`, after `timeout`, or on a signal.
void futex_wait(const std::atomic<uint32_t>& word, uint32_t expected, Duration timeout);
void futex_wake_all(const std::atomic<uint32_t>& word);

// One polite turn of a short busy wait.
inline void cpu_pause() {
#if SYNCENGINE_X86_64
  __builtin_ia32_pause();
#elif SYNCENGINE_AARCH64
  asm volatile("isb");  // about as long as the other; `yield` is no pause at all on server cores
#endif
}

}  // namespace syncengine
