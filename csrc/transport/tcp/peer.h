// A connected peer: one connection for control (messages, heartbeats, who is ready for what), several for data.
//
// Ownership: owns the sockets. Thread-safety: under the endpoint's progress lock. Failure: throws the Error that ends
// the peer; the endpoint then calls fail(), which closes everything.
#pragma once

#include <array>
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

// One data connection, on which frames and their payloads come and go. By scatter and gather, one system call can move
// a header and a payload, directly between the socket and the payload's final place.
//
// Thread-safety: under the endpoint's progress lock. Failure: a Status; what the bytes mean is not this class's
// business.

enum class Status : uint8_t {
  Open,
  Ended,   // the other side will send no more
  Broken,  // errno says why
};

// The readiness of a socket, edge-triggered: set by the kernel's events, cleared by a call that found nothing more to
// read, or no more room.
struct Readiness {
  bool readable = true;
  bool writable = true;
  bool hung_up = false;
};

class DataChannel : public Readiness {
 public:
  explicit DataChannel(ParentFd fd) : fd_(std::move(fd)) { give_at_a_time(kChunkBytes); }

  Status status = Status::Open;

  // Makes one system call; returns true if bytes came. Afterwards the caller takes an ended_frame(), if there is one,
  // and calls receive({}); then, if there is a begun_frame(), it calls receive() with the arrival for that frame's
  // payload.
  bool read(std::vector<std::byte>& scratch);
  Arrival* ended_frame();                         // its payload is whole
  std::optional<std::string_view> begun_frame();  // its header is whole
  void receive(std::optional<Arrival> arrival);
  bool is_reading() const { return arrival_.has_value(); }  // a payload

  bool is_writing() const { return piece_.has_value(); }
  void start(OutgoingPiece piece, bool checksum);
  // Makes one system call. Returns the piece when all of it has been written.
  std::optional<OutgoingPiece> write();
  // Bytes to give the connection at a time: what it sends in about two milliseconds. Whatever a slow connection has
  // been given too early can't go over another one any more.
  uint32_t piece_bytes() const { return piece_bytes_; }
  Send* writing() { return piece_ ? piece_->send.get() : nullptr; }

  void end_writing();  // the other side then reads the end
  void close() { fd_.reset(); }

 private:
  void measure(size_t bytes);
  void give_at_a_time(uint32_t bytes);

  ParentFd fd_;
  // State of reading: a header, then its payload.
  std::array<char, kFrameBytes> header_in_;
  size_t header_got_ = 0;
  std::optional<Arrival> arrival_;
  size_t payload_got_ = 0;
  // State of writing a frame.
  std::optional<OutgoingPiece> piece_;
  std::string header_out_;
  size_t sent_ = 0;                 // of header and payload together
  Clock::time_point ended_{};       // when the last piece was out
  Clock::time_point busy_since_{};  // beginning of the time being measured, without long pauses since
  size_t busy_bytes_ = 0;           // bytes sent since
  uint32_t piece_bytes_ = 0;
};

class Peer {
 public:
  Peer(Shared& shared, const Options& options, int rank, Probe probe, std::vector<ParentFd> sockets);

  matching::Session& session() { return session_; }
  void withdraw(uint64_t first, uint64_t last, const Error& error);

  // Takes events that the kernel reports for one of the sockets, the first of which is for control.
  void on_event(size_t connection, uint32_t events);

  // Writes control frames. Called for all peers before any is given data: control frames would wait behind the data in
  // the host's send queue.
  void speak();

  // Makes at most one system call each way on each connection. Returns true if there may be more to do at once.
  bool step();
  bool has_unsent() const;  // bytes that need nothing but more steps

  void beat();                            // says that this rank is alive
  void look_at_clock(Clock::time_point);  // checks whether the peer is
  void fail(const Error& error);

  // Leaves in order: what is under way is sent, then a goodbye, then the connections are closed. gone() is true once
  // the peer has answered with its own goodbye, or has failed.
  void take_leave(const Error& error);
  bool gone() const;

  // Whether the peer was lost not long ago, and its process may still live. Such a peer must not find this process's
  // port closed, which it would take for a death, although this rank may only have gone on without it and ended.
  bool is_missed() const;
  // Whether the process of a missed peer has just been found to have ended, so soon after it was last heard that it
  // can't have gone on without this rank first. Called in each pass.
  bool has_just_ended(int epoll);

 private:
  struct ControlChannel : Readiness {
    ParentFd fd;
    bool ended = false;
    std::string in;
    size_t written = 0;  // of the session's frames for control
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
  // Times of boot_time(), which goes on while the machine sleeps. `emptied_`: when the control connection last had
  // nothing left to read. `heard_`: the value of `emptied_` before the last bytes came, which therefore came later than
  // `heard_`, however long this process slept before it read them.
  Duration emptied_, heard_;
  std::optional<Duration> lost_;  // when the peer was lost, while it is missed
  ControlChannel control_;
  std::vector<DataChannel> data_;
  std::optional<Clock::time_point> broken_;  // when a data connection ended without a goodbye, which may be on its way
  std::string how_broken_;
};

}  // namespace syncengine::tcp
