// File descriptors of this process alone.
#pragma once

#include <functional>
#include <utility>

#include "base/descriptors.h"

namespace syncengine {

// A descriptor that forked children (DataLoader workers) do not keep. A child that outlived its parent would hold the
// parent's connections and port open, and the peers would take the parent for alive. No fork by another thread comes
// between `open` and the note of what it has opened.
//
// Thread-safety: any thread. In the child the number stays taken, by /dev/null, so that nobody closes a stranger's
// descriptor.

class ParentFd {
 public:
  ParentFd() = default;
  explicit ParentFd(const std::function<int()>& open);
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

}  // namespace syncengine
