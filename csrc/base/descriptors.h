// How many file descriptors this process may still open.
//
// Thread-safety: any thread.
#pragma once

#include <unistd.h>

#include <cstddef>
#include <string>
#include <utility>

namespace syncengine {

// A file descriptor that closes itself.

class UniqueFd {
 public:
  UniqueFd() = default;
  explicit UniqueFd(int fd) : fd_(fd) {}
  UniqueFd(UniqueFd&& other) noexcept : fd_(std::exchange(other.fd_, -1)) {}
  UniqueFd& operator=(UniqueFd&& other) noexcept {
    std::swap(fd_, other.fd_);
    return *this;
  }
  ~UniqueFd() { reset(); }

  int get() const { return fd_; }
  explicit operator bool() const { return fd_ >= 0; }
  void reset() {
    if (fd_ >= 0) ::close(std::exchange(fd_, -1));
  }

 private:
  int fd_ = -1;
};

size_t open_descriptors();  // of this process; 0 where it can't be known
size_t most_descriptors();  // ulimit -n

// Throws InvalidUsage, naming `who`, the limit and the one to set, if `count` more don't fit below `ulimit -n`. What
// can't be known (no /proc) is taken to fit.
void require_descriptors(const std::string& who, size_t count);

// The error of a call that wanted a descriptor or sent one: as throw_system_error, and with what to do if there are too
// many.
[[noreturn]] void throw_descriptor_error(const std::string& what, int error);

}  // namespace syncengine
