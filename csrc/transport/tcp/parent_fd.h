// A descriptor that forked children (DataLoader workers) do not keep: one that outlived its parent would hold the
// parent's connections open, and the peers would learn of its death only by its silence.
//
// Thread-safety: any thread. In the child the number stays taken, by /dev/null, so that nobody closes somebody else's.
#pragma once

#include "base/fd.h"

namespace syncengine::tcp {

class ParentFd {
 public:
  ParentFd() = default;
  explicit ParentFd(UniqueFd fd);
  ParentFd(ParentFd&& other) noexcept : fd_(std::move(other.fd_)) {}
  ParentFd& operator=(ParentFd&& other) noexcept {
    std::swap(fd_, other.fd_);
    return *this;
  }
  ~ParentFd() { reset(); }

  int get() const { return fd_.get(); }
  explicit operator bool() const { return static_cast<bool>(fd_); }
  void reset();

 private:
  UniqueFd fd_;
};

}  // namespace syncengine::tcp
