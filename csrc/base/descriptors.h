// File descriptors: owners that close them, and how many this process may still open.
//
// Thread-safety: any thread.
#pragma once

#include <unistd.h>

#include <cstddef>
#include <functional>
#include <string>
#include <utility>

namespace syncengine {

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

// A descriptor that forked children (DataLoader workers) do not keep. A child that outlived its parent would hold the
// parent's connections and port open, and the peers would take the parent for alive. `open` is called under a lock, so
// that no other thread forks before the new descriptor is registered. In the child /dev/null takes the descriptor's
// number, so that a later close() of that number closes no other file.
class ParentFd {
 public:
  ParentFd() = default;
  explicit ParentFd(const std::function<int()>& open);
  ParentFd(ParentFd&&) noexcept = default;
  ParentFd& operator=(ParentFd&&) noexcept = default;
  ~ParentFd() { reset(); }

  int get() const { return fd_.get(); }
  explicit operator bool() const { return static_cast<bool>(fd_); }
  void reset();

 private:
  UniqueFd fd_;
};

size_t open_descriptors();  // of this process; 0 if /proc does not say
size_t most_descriptors();  // ulimit -n

// Throws InvalidUsage if `count` more descriptors don't fit below `ulimit -n`. The text says that `who` needs them,
// what the limit is, and to what it must be raised. Without /proc, no descriptor counts as open.
void require_descriptors(const std::string& who, size_t count);

}  // namespace syncengine
