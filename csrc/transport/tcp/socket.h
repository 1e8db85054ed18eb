// The few things done with TCP sockets. All are non-blocking and closed on exec.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include "base/descriptors.h"
#include "transport/tcp/address.h"

namespace syncengine::tcp {

// On this address only. Throws InvalidUsage.
UniqueFd listen_on(const Ip& ip);
uint16_t port_of(const UniqueFd& listener);

// A connection that has begun; it is writable once it has succeeded or failed.
UniqueFd begin_connect(const Ip& from, const Ip& to, uint16_t port);
bool is_decided(const UniqueFd& socket);    // whether it has
int connect_error(const UniqueFd& socket);  // 0 if it has succeeded

void send_at_once(const UniqueFd& socket);     // nothing is held back to fill a packet
void keep_short_queue(int socket, int bytes);  // writable only while less than that is unsent

// A descriptor that forked children (DataLoader workers) do not keep: one that outlived its parent would hold the
// parent's connections open, and the peers would learn of its death only by its silence.
//
// Thread-safety: any thread. In the child the number stays taken, by /dev/null, so that nobody closes somebody else's.

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
