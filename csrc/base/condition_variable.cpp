#include <condition_variable>

#include <pthread.h>

// libstdc++ gave std::condition_variable::wait a new version in GCC 12, and older systems lack it. This definition,
// which is hidden, takes its place in the extension, so that a wheel runs on those systems, too.
extern "C" __attribute__((visibility("hidden"))) void syncengine_wait(
    std::condition_variable* changed,
    std::unique_lock<std::mutex>* lock) __asm__("_ZNSt18condition_variable4waitERSt11unique_lockISt5mutexE");

void syncengine_wait(std::condition_variable* changed, std::unique_lock<std::mutex>* lock) {
  pthread_cond_wait(changed->native_handle(), lock->mutex()->native_handle());
}
