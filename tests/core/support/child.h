// Forked children of a test, and what the kernel says about a process's memory.
#pragma once

#include <sys/types.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdio>
#include <functional>
#include <string>

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
  FILE* maps = std::fopen("/proc/self/maps", "r");
  char line[512];
  bool shared = false;
  while (std::fgets(line, sizeof(line), maps)) {
    unsigned long begin = 0, end = 0;
    char mode[5] = "";
    if (std::sscanf(line, "%lx-%lx %4s", &begin, &end, mode) != 3) continue;
    auto place = reinterpret_cast<unsigned long>(address);
    if (place >= begin && place < end) shared = mode[3] == 's';
  }
  std::fclose(maps);
  return shared;
}

// Bytes of `key` in this process's sums over its mappings: "Anonymous", "Pss_Shmem".
inline long memory_of_process(const char* key) {
  FILE* sums = std::fopen("/proc/self/smaps_rollup", "r");
  char line[256];
  long kilobytes = -1;
  const std::string format = std::string(key) + ": %ld kB";
  while (kilobytes < 0 && std::fgets(line, sizeof(line), sums)) std::sscanf(line, format.c_str(), &kilobytes);
  std::fclose(sums);
  return kilobytes * 1024;
}

}  // namespace syncengine::testing
