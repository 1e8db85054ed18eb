// A connected peer: one connection for control (messages, heartbeats, who is ready for what), several for data.
//
// Ownership: owns the sockets. Thread-safety: under the endpoint's progress lock. Failure: throws the Error that ends
// the peer; the endpoint then calls fail(), which closes everything.
#pragma once

#include <array>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "base/deadline.h"
#include "transport/matching/inbox.h"
#include "transport/matching/outbox.h"
#include "transport/matching/session.h"
#include "transport/tcp/probe.h"
#include "transport/tcp/socket.h"
#include "transport/tcp/tcp.h"

namespace syncengine::tcp {

// One data connection: frames and their payloads, in and out, by scatter and gather straight from and to their places.
//
// Thread-safety: under the endpoint's progress lock. Failure: a Status; what the bytes mean is others' business.

using namespace matching;

enum class Status : uint8_t {
  Open,
  Ended,   // the other side will send no more
  Broken,  // errno says why
};

class DataChannel {
 public:
  explicit DataChannel(ParentFd fd) : fd_(std::move(fd)) { give_at_a_time(kChunkBytes); }

  int fd() const { return fd_.get(); }

  // Edge-triggered: set by the kernel's events, cleared by a call that met the end.
  bool readable = true;
  bool writable = true;
  bool hung_up = false;
  Status status = Status::Open;

  // One system call; true if bytes came. Afterwards: while there is an ended_frame(), receive() nothing; while there is
  // a begun_frame(), receive() what becomes of it.
  bool read(std::vector<std::byte>& scratch);
  Arrival* ended_frame();                         // its payload is whole
  std::optional<std::string_view> begun_frame();  // its header is whole
  void receive(std::optional<Arrival> arrival);
  bool is_reading() const { return arrival_.has_value(); }  // a payload

  bool is_writing() const { return piece_.has_value(); }
  void start(Piece piece, bool checksum);
  // One system call. The piece, once it is out.
  std::optional<Piece> write();
  // How much to give it at a time: what it sends in about two milliseconds. What a slow connection has been given early
  // can't go by another one any more.
  uint32_t piece_bytes() const { return piece_bytes_; }
  Send* writing() { return piece_ ? piece_->send.get() : nullptr; }

  void end_writing();  // the other side sees the end
  void close() { fd_.reset(); }

 private:
  void measure(size_t bytes);
  void give_at_a_time(uint32_t bytes);

  ParentFd fd_;
  // In: a header, then its payload.
  std::array<char, kFrameBytes> header_in_;
  size_t header_got_ = 0;
  std::optional<Arrival> arrival_;
  size_t payload_got_ = 0;
  // Out.
  std::optional<Piece> piece_;
  std::string header_out_;
  size_t sent_ = 0;                 // of header and payload
  Clock::time_point ended_{};       // the last piece
  Clock::time_point busy_since_{};  // it has hardly rested since, or was measured then
  size_t busy_bytes_ = 0;           // sent since
  uint32_t piece_bytes_ = 0;
};

class Peer {
 public:
  Peer(Shared& shared, const Options& options, int rank, Probe probe, std::vector<ParentFd> sockets);

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

  // Whether the peer was lost not long ago, and its process may live: then it must not find this one's port closed, and
  // think that this one has died rather than gone on without it.
  bool is_missed() const;
  // In each pass: whether the process of a peer that is missed has just been found to have ended, so soon after it was
  // last heard that it can't have gone on without this one first.
  bool has_just_ended(int epoll);

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
  const Duration heartbeat_;
  Probe probe_;
  // By boot_time(), which goes on while the machine sleeps: when nothing was left to read on the control connection,
  // and when that was so last before the last bytes came. So they came later than `heard_`, however long this process
  // slept before it read them.
  Duration emptied_, heard_;
  std::optional<Duration> lost_;  // since when it is missed
  Control control_;
  std::vector<DataChannel> data_;
  std::optional<Clock::time_point> broken_;  // a data connection ended without a goodbye, which may be on its way
  std::string how_broken_;
};

}  // namespace syncengine::tcp
