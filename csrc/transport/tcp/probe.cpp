#include "transport/tcp/probe.h"

#include <sys/epoll.h>

#include <cerrno>

#include "base/error.h"

namespace syncengine::tcp {

bool Probe::is_refused(int epoll) {
  if (!fd_) {
    const auto now = Clock::now();
    if (now < next_) return false;
    next_ = now + std::chrono::milliseconds(100);  // the peer's kernel may be about to close the port
    try {
      fd_ = begin_connect(from_, to_, port_);
    } catch (const Error&) {  // no descriptor is left, or the interface is gone
      return false;
    }
    if (!fd_) return errno == ECONNREFUSED;
    note_icmp(fd_);
    epoll_event event{.events = EPOLLOUT | EPOLLET, .data = {.u64 = kAlarm}};
    (void)epoll_ctl(epoll, EPOLL_CTL_ADD, fd_.get(), &event);  // if it fails, the next heartbeat wakes the loop
  }
  if (!is_decided(fd_)) return false;
  const bool refused = connect_error(fd_) == ECONNREFUSED && !has_icmp(fd_);
  fd_.reset();
  return refused;
}

}  // namespace syncengine::tcp
