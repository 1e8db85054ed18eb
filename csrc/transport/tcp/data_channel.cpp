#include "transport/tcp/data_channel.h"

#include <sys/socket.h>
#include <sys/uio.h>

#include <algorithm>
#include <cerrno>
#include <utility>

#include "transport/tcp/socket.h"

namespace syncengine::tcp {

namespace {

constexpr double kPieceSeconds = 2e-3;
constexpr auto kRest = std::chrono::milliseconds(1), kMeasure = std::chrono::milliseconds(5);

bool would_block(int code) { return code == EAGAIN || code == EWOULDBLOCK || code == EINTR; }

}  // namespace

bool DataChannel::read(std::vector<std::byte>& scratch) {
  iovec parts[2];
  size_t count = 0, wanted = 0, payload = arrival_ ? arrival_->frame.payload - payload_got_ : 0;
  bool whole = true;  // the call may reach behind the payload
  if (payload > 0) {
    std::byte* place = arrival_->place();
    if (!place) whole = payload <= scratch.size(), payload = std::min(payload, scratch.size());
    parts[count++] = {place ? place + payload_got_ : scratch.data(), payload};
    wanted += payload;
  }
  if (whole) {
    parts[count++] = {header_in_.data() + header_got_, header_in_.size() - header_got_};
    wanted += header_in_.size() - header_got_;
  }
  msghdr message{};
  message.msg_iov = parts;
  message.msg_iovlen = count;
  ssize_t got = recvmsg(fd_.get(), &message, 0);
  if (got <= 0) {
    readable = false;
    if (got == 0)
      status = Status::Ended;
    else if (!would_block(errno))
      status = Status::Broken;
    else if (errno == EINTR)
      readable = true;
    return false;
  }
  auto bytes = static_cast<size_t>(got);
  if (bytes < wanted && !hung_up) readable = false;  // that was all; the kernel will tell of more
  size_t of_payload = std::min(bytes, payload);
  payload_got_ += of_payload;
  header_got_ += bytes - of_payload;
  return true;
}

Arrival* DataChannel::ended_frame() {
  if (!arrival_ || payload_got_ < arrival_->frame.payload) return nullptr;
  return &*arrival_;
}

std::optional<std::string_view> DataChannel::begun_frame() {
  if (header_got_ < header_in_.size()) return {};
  return std::string_view(header_in_.data(), header_in_.size());
}

void DataChannel::receive(std::optional<Arrival> arrival) {
  arrival_ = std::move(arrival);
  payload_got_ = 0;
  if (arrival_) header_got_ = 0;
}

void DataChannel::start(Piece piece) {
  header_out_ = encode(piece.frame);
  piece_ = std::move(piece);
  sent_ = 0;
  auto now = Clock::now();
  if (now - ended_ > kRest) busy_since_ = now, busy_bytes_ = 0;
}

std::optional<Piece> DataChannel::write() {
  iovec parts[2];
  size_t count = 0, header = header_out_.size(), payload = piece_->frame.payload;
  if (sent_ < header) parts[count++] = {header_out_.data() + sent_, header - sent_};
  size_t skip = sent_ > header ? sent_ - header : 0;
  if (payload > 0) parts[count++] = {const_cast<std::byte*>(piece_->payload()) + skip, payload - skip};
  msghdr message{};
  message.msg_iov = parts;
  message.msg_iovlen = count;
  ssize_t sent = sendmsg(fd_.get(), &message, MSG_NOSIGNAL);
  if (sent < 0) {
    if (errno == EINTR) return {};
    writable = false;
    if (!would_block(errno)) status = Status::Broken;
    return {};
  }
  sent_ += static_cast<size_t>(sent);
  if (sent_ < header + payload) return {};
  measure(payload);
  return std::exchange(piece_, std::nullopt);
}

// Over several pieces: the kernel takes the first ones at once, and a single one may wait for this thread's turn on a
// core. Pieces that are too small for a quick connection would make it slow, and so stay small.
void DataChannel::measure(size_t bytes) {
  ended_ = Clock::now();
  busy_bytes_ += bytes;
  if (ended_ - busy_since_ < kMeasure) return;
  double speed = static_cast<double>(busy_bytes_) / std::chrono::duration<double>(ended_ - busy_since_).count();
  busy_since_ = ended_, busy_bytes_ = 0;
  auto units = static_cast<uint32_t>(std::min<double>(speed * kPieceSeconds, kChunkBytes)) / kChunkUnit;
  give_at_a_time(std::max(units, 1u) * kChunkUnit);
}

void DataChannel::give_at_a_time(uint32_t bytes) {
  if (std::exchange(piece_bytes_, bytes) != bytes) keep_short_queue(fd(), static_cast<int>(bytes));
}

void DataChannel::end_writing() { shutdown(fd_.get(), SHUT_WR); }

}  // namespace syncengine::tcp
