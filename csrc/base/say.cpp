#include "base/say.h"

#include <poll.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <condition_variable>
#include <cstddef>
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
  std::ptrdiff_t dropped = 0;       // lines that found no place there, and have not been told of
  pid_t writer = 0;                 // the process in which a thread writes: a forked child has none
};

// Lines that wait for stderr. Never destroyed, since a thread may still be writing them when the process ends.
SaidLines& said = *new SaidLines;

void write_all(const std::string& text) {
  for (size_t done = 0; done < text.size();) {
    const ssize_t count = ::write(STDERR_FILENO, text.data() + done, text.size() - done);
    if (count > 0) done += static_cast<size_t>(count);
    if (count >= 0 || errno == EINTR) continue;
    if (errno != EAGAIN) return;
    pollfd room{.fd = STDERR_FILENO, .events = POLLOUT, .revents = 0};  // some program has made stderr nonblocking
    ::poll(&room, 1, -1);
  }
}

void write_what_waits() {
  begin_thread("syncengine-say");
  std::unique_lock lock(said.mutex);
  while (!said.waiting.empty()) {
    const std::string text = said.waiting.front();
    lock.unlock();
    write_all(text);
    lock.lock();
    said.waiting.pop_front();
    if (said.waiting.empty() && said.dropped > 0)
      said.waiting.push_back("syncengine: lines dropped here, since too many waited for stderr: " +
                             std::to_string(std::exchange(said.dropped, 0)) + "\n");
  }
  said.writer = 0;
  said.written.notify_all();
}

}  // namespace

void say(std::string lines) {
  std::lock_guard lock(said.mutex);
  if (said.writer != 0 && said.writer != getpid()) {
    said.waiting.clear();
    said.dropped = 0;
    said.writer = 0;
  }
  if (said.waiting.size() < kMostWaiting)
    said.waiting.push_back(std::move(lines));
  else
    said.dropped += std::count(lines.begin(), lines.end(), '\n');
  if (said.writer == getpid()) return;
  try {
    std::thread(write_what_waits).detach();
    said.writer = getpid();
  } catch (const std::system_error&) {
    // say() must not block, so if no thread can be started now, the lines wait for a later call that can start one.
  }
}

void await_said() {
  std::unique_lock lock(said.mutex);
  said.written.wait_for(lock, std::chrono::seconds(1), [&] { return said.writer != getpid(); });
}

}  // namespace syncengine
