// One data connection: frames and their payloads, in and out, by scatter and gather straight from and to their places.
//
// Thread-safety: under the endpoint's progress lock. Failure: a Status; what the bytes mean is others' business.
#pragma once

#include <array>
#include <optional>

#include "base/deadline.h"
#include "base/fd.h"
#include "transport/matching/inbox.h"
#include "transport/matching/outbox.h"
#include "transport/tcp/parent_fd.h"

namespace syncengine::tcp {

using namespace matching;

enum class Status : uint8_t {
  Open,
  Ended,   // the other side will send no more
  Broken,  // errno says why
};

class DataChannel {
 public:
  explicit DataChannel(UniqueFd fd) : fd_(std::move(fd)) { give_at_a_time(kChunkBytes); }

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
  void start(Piece piece);
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

}  // namespace syncengine::tcp
