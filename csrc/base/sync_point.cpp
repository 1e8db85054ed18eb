#include "base/sync_point.h"

#ifdef SYNCENGINE_TEST_HOOKS

#include <unistd.h>

#include <atomic>
#include <chrono>
#include <csignal>
#include <cstdlib>
#include <string>
#include <thread>

namespace syncengine {

namespace {

struct Fault {
  std::string point, action;
  int countdown = 0;
};

Fault read_fault() {
  const char* text = std::getenv("SYNCENGINE_TEST_FAULT");
  if (!text) return {};
  std::string all(text);
  size_t first = all.find(':'), second = all.find(':', first + 1);
  if (second == std::string::npos) return {};
  return {all.substr(0, first), all.substr(second + 1), std::atoi(all.c_str() + first + 1)};
}

void act(const std::string& action) {
  if (action == "kill") raise(SIGKILL);
  if (action == "segv") {
    std::signal(SIGSEGV, SIG_DFL);
    raise(SIGSEGV);
  }
  if (action == "stop") raise(SIGSTOP);
  if (action == "exit") _exit(3);
  if (action.starts_with("sleep")) std::this_thread::sleep_for(std::chrono::milliseconds(std::stoi(action.substr(5))));
}

}  // namespace

void sync_point(const char* name) {
  static const Fault& fault = *new Fault(read_fault());  // never destroyed: threads pass until the process has ended
  static std::atomic<int> passed{0};
  if (fault.countdown > 0 && fault.point == name && ++passed == fault.countdown) act(fault.action);
}

}  // namespace syncengine

#endif
