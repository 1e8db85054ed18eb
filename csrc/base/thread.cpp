#include "base/thread.h"

#include <pthread.h>
#include <signal.h>

#include <initializer_list>

namespace syncengine {

void begin_thread(const char* name) {
  sigset_t all;
  sigfillset(&all);
  for (int fault : {SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGABRT}) sigdelset(&all, fault);
  pthread_sigmask(SIG_SETMASK, &all, nullptr);
  pthread_setname_np(pthread_self(), name);
}

}  // namespace syncengine
