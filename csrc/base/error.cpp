#include "base/error.h"

#include <sys/resource.h>

#include <cerrno>
#include <cstring>

namespace syncengine {

const char* name(ErrorKind kind) {
  switch (kind) {
    case ErrorKind::PeerLost: return "PeerLost";
    case ErrorKind::Timeout: return "Timeout";
    case ErrorKind::Mismatch: return "Mismatch";
    case ErrorKind::Aborted: return "Aborted";
    case ErrorKind::InvalidUsage: return "InvalidUsage";
    case ErrorKind::NotFinite: return "NotFinite";
  }
  return "SyncError";
}

namespace {

// The part of an error's text that states a limit, such as "(ulimit -n is 64)", in the units of the shell.
std::string limit_text(const char* option, decltype(RLIMIT_AS) resource, rlim_t unit) {
  rlimit limits{};
  const bool limited = getrlimit(resource, &limits) == 0 && limits.rlim_cur != RLIM_INFINITY;
  return std::string("(ulimit ") + option + " is " + (limited ? std::to_string(limits.rlim_cur / unit) : "unlimited") +
         ")";
}

// The likely reason why Linux refused a system call, and the remedy; "" if the message of `code` says enough.
std::string way_out(int code, const std::string& call) {
  switch (code) {
    case EPERM:
    case EACCES:
    case ENOSYS: return call.empty() ? "" : " (by a sandbox's seccomp filter, say): allow " + call + " there";
    case EMFILE: return " " + limit_text("-n", RLIMIT_NOFILE, 1) + ": raise ulimit -n";
    case ENFILE: return " " + limit_text("-n", RLIMIT_NOFILE, 1) + ": raise fs.file-max";
    case EFBIG:
      return " " + limit_text("-f", RLIMIT_FSIZE, 1024) + ": raise ulimit -f, or lower SYNCENGINE_ARENA_BYTES";
    case ENOMEM:
      return " " + limit_text("-v", RLIMIT_AS, 1024) +
             ": raise ulimit -v, or lower SYNCENGINE_ARENA_BYTES on all ranks, since a process maps the arena of each "
             "rank of its host";
    case EAGAIN:
      if (call != "clone") return "";
      return " " + limit_text("-u", RLIMIT_NPROC, 1) +
             ": raise ulimit -u, the cgroup's pids.max, or ulimit -v (its stack)";
    default: return "";
  }
}

}  // namespace

void throw_system_error(const std::string& text, int code, const char* call) {
  throw Error(ErrorKind::InvalidUsage, text + ": " + std::strerror(code) + way_out(code, call));
}

}  // namespace syncengine
