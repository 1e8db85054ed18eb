// The start of the engine's threads, how their owners are deleted, and how threads sleep on a futex.
//
// Thread-safety: any thread. Failure: InvalidUsage if no thread can be started.
#pragma once

#include <atomic>
#include <cstdint>
#include <system_error>
#include <thread>
#include <utility>

#include "base/deadline.h"
#include "base/error.h"
#include "base/processor.h"

namespace syncengine {

// Starts a thread that calls `call`. Throws InvalidUsage with the way out if the system has no thread left.
template <class... Call>
std::thread start_thread(Call&&... call) {
  try {
    return std::thread(std::forward<Call>(call)...);
  } catch (const std::system_error& error) {
    throw_system_error("can't start a thread", error.code().value(), "clone");
  }
}

// Names the calling thread (at most 15 characters), and blocks all signals in it but those of its own faults, so that
// the program's own threads handle them.
void begin_thread(const char* name);

// Deletes `object`, whose destructor joins the thread `its`. If that is the calling thread, another thread deletes the
// object instead. This can happen when the thread drops a tensor of an operation: Python may then collect garbage, and
// the garbage may include the last reference to `object`.
template <class Object>
void delete_off(const std::thread& its, Object* object) {
  if (its.get_id() == std::this_thread::get_id())
    start_thread([object] { delete object; }).detach();
  else
    delete object;
}

// Waits on the futex `word`, which processes may share. Returns when woken, when `word` differs from `expected`, after
// `timeout`, on a signal, or spuriously; callers re-check.
void futex_wait(const std::atomic<uint32_t>& word, uint32_t expected, Duration timeout);
void futex_wake_all(const std::atomic<uint32_t>& word);

// Tells the processor that the caller is spinning, once in each turn of a short busy wait.
inline void cpu_pause() {
#if SYNCENGINE_X86_64
  __builtin_ia32_pause();
#elif SYNCENGINE_AARCH64
  asm volatile("isb");  // about as long as x86's pause; `yield` is no pause at all on server cores
#endif
}

}  // namespace syncengine
