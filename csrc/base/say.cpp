#include "base/say.h"

#include <unistd.h>

#include <cerrno>
#include <condition_variable>
#include <deque>
#include <mutex>
#include <system_error>
#include <thread>
#include <utility>

#include "base/thread.h"

namespace syncengine {

namespace {

constexpr size_t kMostWaiting = 64;

struct SaidLines {
  std::mutex mutex;
  std::condition_variable written;
  std::deque<std::string> waiting;  // the first one is being written
  pid_t writer = 0;                 // the process in which a thread writes: a forked child has none
};

// Never destroyed, since a thread may be writing when the process ends.
SaidLines& said() {
  static auto* all = new SaidLines;
  return *all;
}

void write_all(const std::string& text) {
  for (size_t done = 0; done < text.size();) {
    const ssize_t count = ::write(STDERR_FILENO, text.data() + done, text.size() - done);
    if (count < 0 && errno != EINTR) return;
    if (count > 0) done += static_cast<size_t>(count);
  }
}

void write_what_waits() {
  begin_thread("syncengine-say");
  auto& all = said();
  std::unique_lock lock(all.mutex);
  while (!all.waiting.empty()) {
    const std::string text = all.waiting.front();
    lock.unlock();
    write_all(text);
    lock.lock();
    all.waiting.pop_front();
  }
  all.writer = 0;
  all.written.notify_all();
}

}  // namespace

void say(std::string lines) {
  auto& all = said();
  std::lock_guard lock(all.mutex);
  if (all.writer != 0 && all.writer != getpid()) all.waiting.clear();
  if (all.waiting.size() >= kMostWaiting) return;
  all.waiting.push_back(std::move(lines));
  if (all.writer == getpid()) return;
  try {
    std::thread(write_what_waits).detach();
    all.writer = getpid();
  } catch (const std::system_error&) {  // no thread can be started, and no caller may be made to wait
    all.waiting.clear();
  }
}

void await_said() {
  auto& all = said();
  std::unique_lock lock(all.mutex);
  all.written.wait_for(lock, std::chrono::seconds(1), [&] { return all.writer != getpid(); });
}

}  // namespace syncengine
