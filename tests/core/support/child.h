// Forked children of a test, limits of a process, and what the kernel says about its memory.
#pragma once

#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/types.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdio>
#include <fstream>
#include <functional>
#include <string>
#include <utility>

#include "base/descriptors.h"
#include "base/say.h"
#include "test.h"

namespace syncengine::testing {

// Forks; the child runs `body` and says whether it returned true.
inline pid_t start_child(const std::function<bool()>& body) {
  pid_t child = fork();
  if (child == 0) {
    alarm(60);  // one that hangs ends
    bool result = false;
    try {
      result = body();
    } catch (const std::exception& error) {
      std::fprintf(stderr, "a child: %s\n", error.what());
    } catch (...) {
    }
    _exit(result ? 0 : 1);
  }
  return child;
}

inline bool was_true(pid_t child) {
  int status = 0;
  CHECK_EQ(waitpid(child, &status, 0), child);
  return WIFEXITED(status) && WEXITSTATUS(status) == 0;
}

inline bool true_in_child(const std::function<bool()>& body) { return was_true(start_child(body)); }

// Two sockets that are connected with each other.
inline std::pair<UniqueFd, UniqueFd> socket_pair(int flags = 0) {
  int ends[2];
  CHECK_EQ(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | flags, 0, ends), 0);
  return {UniqueFd(ends[0]), UniqueFd(ends[1])};
}

// A forked child, which runs when the constructor returns, and does nothing until end().
class IdleChild {
 public:
  IdleChild() {
    child_ = start_child([this] {
      here_.reset();
      return send(there_.get(), &byte_, 1, MSG_NOSIGNAL) == 1 && recv(there_.get(), &byte_, 1, 0) == 0;
    });
    there_.reset();
    CHECK_EQ(recv(here_.get(), &byte_, 1, 0), 1);
  }
  void end() {
    here_.reset();
    CHECK(was_true(child_));
  }

 private:
  std::pair<UniqueFd, UniqueFd> sockets_ = socket_pair();
  UniqueFd &here_ = sockets_.first, &there_ = sockets_.second;
  char byte_ = 0;
  pid_t child_;
};

// While it lives, the kernel gives this process at most so much of a resource.
class Limited {
 public:
  Limited(int resource, rlim_t most) : resource_(resource) {
    CHECK_EQ(getrlimit(resource, &before_), 0);
    const rlimit less{.rlim_cur = most, .rlim_max = before_.rlim_max};
    CHECK_EQ(setrlimit(resource, &less), 0);
  }
  ~Limited() { setrlimit(resource_, &before_); }

 private:
  const int resource_;
  rlimit before_{};
};

// The number of the next descriptor; with none free below it, how many are open.
inline size_t next_descriptor() { return static_cast<size_t>(UniqueFd(dup(0)).get()); }

// Runs `body`, which must not throw, in a child, and returns all that the child writes to stderr.
inline std::string stderr_of_child(const std::function<void()>& body) {
  int ends[2];
  CHECK_EQ(pipe(ends), 0);
  const UniqueFd from(ends[0]);
  UniqueFd to(ends[1]);
  const pid_t child = start_child([&] {
    dup2(to.get(), STDERR_FILENO);
    body();
    await_said();
    return true;
  });
  to.reset();
  std::string said;
  char part[512];
  for (ssize_t bytes = 0; (bytes = read(from.get(), part, sizeof(part))) > 0;)
    said.append(part, static_cast<size_t>(bytes));
  if (!was_true(child)) throw Failure("a child failed, and wrote: " + said);
  return said;
}

inline bool is_mapped_shared(const void* address) {
  std::ifstream maps("/proc/self/maps");
  const auto place = reinterpret_cast<unsigned long>(address);
  for (std::string line; std::getline(maps, line);) {
    unsigned long begin = 0, end = 0;
    char mode[5] = "";
    if (std::sscanf(line.c_str(), "%lx-%lx %4s", &begin, &end, mode) != 3) continue;
    if (place >= begin && place < end) return mode[3] == 's';
  }
  return false;
}

// Bytes of `key` in this process's sums over its mappings: "Anonymous", "Pss_Shmem".
inline long memory_of_process(const char* key) {
  std::ifstream sums("/proc/self/smaps_rollup");
  long kilobytes = -1;
  for (std::string word; kilobytes < 0 && sums >> word;)
    if (word == std::string(key) + ":") sums >> kilobytes;
  return kilobytes * 1024;
}

}  // namespace syncengine::testing
