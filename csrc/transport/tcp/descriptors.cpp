#include "transport/tcp/descriptors.h"

#include <dirent.h>
#include <sys/resource.h>

#include <cerrno>
#include <cstring>
#include <memory>

#include "base/error.h"

namespace syncengine::tcp {

namespace {

constexpr size_t kSpare = 16;  // for what else a process opens meanwhile

size_t limit() {
  rlimit files{};
  return getrlimit(RLIMIT_NOFILE, &files) == 0 ? static_cast<size_t>(files.rlim_cur) : RLIM_INFINITY;
}

size_t open_now() {
  std::unique_ptr<DIR, int (*)(DIR*)> folder(opendir("/proc/self/fd"), closedir);
  size_t count = 0;
  while (folder && readdir(folder.get())) ++count;
  return count;  // `.`, `..` and the folder itself are the least of what may come
}

}  // namespace

void require_descriptors(size_t count, const std::string& what) {
  size_t most = limit(), needed = open_now() + count + kSpare;
  if (needed <= most) return;
  throw Error(ErrorKind::InvalidUsage, "this rank needs " + std::to_string(count) + " file descriptors for " + what +
                                           ", which the limit of " + std::to_string(most) +
                                           " does not leave: raise ulimit -n to at least " + std::to_string(needed) +
                                           ", or give fewer init(sockets=...)");
}

void throw_out_of_descriptors(const std::string& text, int code) {
  throw Error(ErrorKind::InvalidUsage, text + ": " + std::strerror(code) + " (" + std::to_string(open_now()) +
                                           " are open, the limit is " + std::to_string(limit()) +
                                           (code == ENFILE ? "): raise fs.file-max" : "): raise ulimit -n"));
}

}  // namespace syncengine::tcp
