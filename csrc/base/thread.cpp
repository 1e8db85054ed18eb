#include "base/thread.h"

#include <linux/futex.h>
#include <pthread.h>
#include <signal.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <climits>
#include <ctime>
#include <initializer_list>

namespace syncengine {

void begin_thread(const char* name) {
  sigset_t all;
  sigfillset(&all);
  for (int fault : {SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGABRT}) sigdelset(&all, fault);
  pthread_sigmask(SIG_SETMASK, &all, nullptr);
  pthread_setname_np(pthread_self(), name);
}

void futex_wait(const std::atomic<uint32_t>& word, uint32_t expected, Duration timeout) {
  auto nanoseconds = std::chrono::duration_cast<std::chrono::nanoseconds>(timeout).count();
  timespec time{static_cast<time_t>(nanoseconds / 1'000'000'000), static_cast<long>(nanoseconds % 1'000'000'000)};
  syscall(SYS_futex, &word, FUTEX_WAIT, expected, &time, nullptr, 0);
}

void futex_wake_all(const std::atomic<uint32_t>& word) {
  syscall(SYS_futex, &word, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
}

}  // namespace syncengine
