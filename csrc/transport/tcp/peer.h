// A connected peer: one connection for control (messages, heartbeats, who is ready for what), several for data.
//
// Ownership: owns the sockets. Thread-safety: under the endpoint's progress lock. Failure: throws the Error that ends
// the peer; the endpoint then calls fail(), which closes everything.
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "base/deadline.h"
#include "transport/matching/session.h"
#include "transport/tcp/data_channel.h"
#include "transport/tcp/tcp.h"

namespace syncengine::tcp {

class Peer {
 public:
  Peer(Shared& shared, const Options& options, int rank, std::vector<UniqueFd> sockets);

  matching::Session& session() { return session_; }
  void withdraw(uint64_t first, uint64_t last, const Error& error);

  // Descriptors and what the kernel says of them; the first is for control.
  std::vector<int> descriptors() const;
  void on_event(size_t connection, uint32_t events);

  // Writes what is to be said: before any peer is given data, behind which it would wait in the host's queue.
  void speak();

  // At most one system call each way on each connection. True if there may be more to do at once.
  bool step();
  bool has_unsent() const;  // that only needs more steps

  void beat();                            // says that this rank is alive
  void look_at_clock(Clock::time_point);  // is the peer?
  void fail(const Error& error);

  // Ends it in order: what is under way is sent, then a goodbye, then the connections' ends; gone() once the peer has
  // answered with its own, or has failed.
  void take_leave(const Error& error);
  bool gone() const;

 private:
  struct Control {
    ParentFd fd;
    bool readable = true;
    bool writable = true;
    bool ended = false;
    std::string in;
    size_t written = 0;  // of the session's frames
  };

  void read_control();
  void write_control();
  void on_control_frames();
  void read_data(DataChannel& channel);
  void write_data(DataChannel& channel);
  void on_end(DataChannel& channel);
  void say_goodbye();
  [[noreturn]] void throw_lost(const std::string& how) const;

  matching::Session session_;
  Control control_;
  std::vector<DataChannel> data_;
  std::optional<Clock::time_point> broken_;  // a data connection ended without a goodbye, which may be on its way
  std::string how_broken_;
};

}  // namespace syncengine::tcp
