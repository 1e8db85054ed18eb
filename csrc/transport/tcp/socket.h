// The few things done with TCP sockets. All are non-blocking and closed on exec.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>

#include "base/descriptors.h"
#include "transport/tcp/address.h"

namespace syncengine::tcp {

// A descriptor that forked children (DataLoader workers) do not keep: one that outlived its parent would hold the
// parent's connections open, and its port, and the peers would take it for alive. No fork by another thread comes
// between `open` and the note of what it has opened.
//
// Thread-safety: any thread. In the child the number stays taken, by /dev/null, so that nobody closes somebody else's.

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

// On this address only. Throws InvalidUsage.
ParentFd listen_on(const Ip& ip);
uint16_t port_of(const ParentFd& listener);
ParentFd accept_on(int listener);

// A connection that has begun; it is writable once it has succeeded or failed.
ParentFd begin_connect(const Ip& from, const Ip& to, uint16_t port);
bool is_decided(const ParentFd& socket);    // whether it has
int connect_error(const ParentFd& socket);  // 0 if it has succeeded

// Whether ICMP was the answer, which anything on the way may send: once note_icmp() has told the kernel to say so.
void note_icmp(const ParentFd& socket);
bool has_icmp(const ParentFd& socket);

void send_at_once(const ParentFd& socket);     // nothing is held back to fill a packet
void keep_short_queue(int socket, int bytes);  // writable only while less than that is unsent

}  // namespace syncengine::tcp
