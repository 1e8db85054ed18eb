#include "transport/tcp/peer.h"

#include <sys/epoll.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <time.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <utility>

#include "transport/matching/frame.h"

namespace syncengine::tcp {

namespace {

constexpr double kPieceSeconds = 2e-3;
constexpr auto kRest = std::chrono::milliseconds(1), kMeasure = std::chrono::milliseconds(5);

constexpr size_t kReadBytes = 16 << 10;    // of control frames at a time
constexpr size_t kKeepWritten = 64 << 10;  // of `out` before it is moved to its front
constexpr Duration kGoodbyeDelay = std::chrono::milliseconds(500);

// Both in heartbeats. kBelieved: how long after a peer was last heard a refused connection proves that it was killed.
// kMissed: how long a port stays open after a peer was lost, so that no peer takes a refused connection for the death
// of a rank that has gone on without that peer and ended.
constexpr int kBelieved = 20, kMissed = 24;

bool would_block(int code) { return code == EAGAIN || code == EWOULDBLOCK || code == EINTR; }

Duration boot_time() {
  timespec now{};
  clock_gettime(CLOCK_BOOTTIME, &now);
  return std::chrono::seconds(now.tv_sec) + std::chrono::nanoseconds(now.tv_nsec);
}

}  // namespace

bool DataChannel::read(std::vector<std::byte>& scratch) {
  iovec parts[2];
  size_t count = 0, payload = arrival_ ? arrival_->frame.payload - payload_got_ : 0;
  size_t header = header_in_.size() - header_got_;
  if (payload > 0) {
    std::byte* place = arrival_->place();
    if (!place && payload > scratch.size()) payload = scratch.size(), header = 0;  // the header comes later
    parts[count++] = {place ? place + payload_got_ : scratch.data(), payload};
  }
  if (header > 0) parts[count++] = {header_in_.data() + header_got_, header};
  msghdr message{.msg_iov = parts, .msg_iovlen = count};
  ssize_t got = recvmsg(fd_.get(), &message, 0);
  if (got <= 0) {
    readable = got < 0 && errno == EINTR;
    if (got == 0)
      status = Status::Ended;
    else if (!would_block(errno))
      status = Status::Broken;
    return false;
  }
  auto bytes = static_cast<size_t>(got);
  // The socket is drained; the kernel will say when more has come.
  if (bytes < payload + header && !hung_up) readable = false;
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

void DataChannel::start(OutgoingPiece piece, bool checksum) {
  header_out_ = encode(piece.frame, checksum);
  piece_ = std::move(piece);
  sent_ = 0;
  auto now = Clock::now();
  if (now - ended_ > kRest) busy_since_ = now, busy_bytes_ = 0;
}

std::optional<OutgoingPiece> DataChannel::write() {
  iovec parts[2];
  size_t count = 0, header = header_out_.size(), payload = piece_->frame.payload;
  if (sent_ < header) parts[count++] = {header_out_.data() + sent_, header - sent_};
  size_t skip = sent_ > header ? sent_ - header : 0;
  if (payload > 0) parts[count++] = {const_cast<std::byte*>(piece_->payload()) + skip, payload - skip};
  msghdr message{.msg_iov = parts, .msg_iovlen = count};
  ssize_t sent = sendmsg(fd_.get(), &message, MSG_NOSIGNAL);
  if (sent < 0) {
    writable = errno == EINTR;
    if (!would_block(errno)) status = Status::Broken;
    return {};
  }
  sent_ += static_cast<size_t>(sent);
  if (sent_ < header + payload) return {};
  measure(payload);
  return std::exchange(piece_, std::nullopt);
}

// Measures the speed over several pieces: Linux takes the first ones at once, and a single one may wait for this
// thread's turn on a core. Small pieces would slow a quick connection down, and would then stay small.
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
  if (std::exchange(piece_bytes_, bytes) != bytes) keep_short_queue(fd_.get(), static_cast<int>(bytes));
}

void DataChannel::end_writing() { shutdown(fd_.get(), SHUT_WR); }

Peer::Peer(Shared& shared, const Options& options, int rank, Probe probe, std::vector<ParentFd> sockets)
    : session_(shared, options.timing, rank),
      heartbeat_(seconds(options.timing.heartbeat)),
      probe_(std::move(probe)),
      emptied_(boot_time()),
      heard_(emptied_) {
  for (auto& socket : sockets) send_at_once(socket);
  control_.fd = std::move(sockets.front());
  for (size_t i = 1; i < sockets.size(); ++i) data_.emplace_back(std::move(sockets[i]));
}

void Peer::withdraw(uint64_t first, uint64_t last, const Error& error) {
  for (auto& channel : data_) {
    Send* send = channel.writing();
    if (send && first <= send->tag && send->tag <= last) send->detach(error);
  }
  session_.withdraw(first, last, error);
}

void Peer::on_event(size_t connection, uint32_t events) {
  Readiness& channel = connection == 0 ? static_cast<Readiness&>(control_) : data_[connection - 1];
  channel.readable |= (events & (EPOLLIN | EPOLLRDHUP | EPOLLHUP | EPOLLERR)) != 0;
  channel.writable |= (events & (EPOLLOUT | EPOLLHUP | EPOLLERR)) != 0;
  channel.hung_up |= (events & (EPOLLRDHUP | EPOLLHUP | EPOLLERR)) != 0;
}

void Peer::speak() {
  if (control_.writable && !session_.out.empty()) write_control();
}

bool Peer::step() {
  if (control_.readable && !control_.ended) read_control();
  bool more = control_.readable && !control_.ended;
  for (auto& channel : data_) {
    if (channel.readable && channel.status == Status::Open) read_data(channel);
    if (channel.writable && channel.status != Status::Broken && session_.life.may_send()) write_data(channel);
    more |= channel.readable && channel.status == Status::Open;
    more |=
        channel.writable && channel.status != Status::Broken && (channel.is_writing() || session_.outbox.has_next());
  }
  speak();
  more |= control_.writable && !session_.out.empty();
  if (session_.life.owes_goodbye()) say_goodbye();
  if (session_.life.state() == ConnectionLifecycle::PeerLeft && gone())
    throw Error(ErrorKind::PeerLost, session_.name() + " has left (it exited, or called syncengine.shutdown())");
  return more;
}

bool Peer::has_unsent() const {
  return !session_.out.empty() || session_.outbox.has_next() ||
         std::any_of(data_.begin(), data_.end(), [](const DataChannel& channel) { return channel.is_writing(); });
}

void Peer::read_control() {
  const Duration now = boot_time();
  size_t had = control_.in.size();
  control_.in.resize(had + kReadBytes);
  ssize_t got = recv(control_.fd.get(), control_.in.data() + had, kReadBytes, 0);
  int code = errno;
  control_.in.resize(had + std::max<ssize_t>(got, 0));
  if (got > 0) {
    session_.heartbeat.heard();
    heard_ = emptied_;
    if (got < static_cast<ssize_t>(kReadBytes)) emptied_ = now;
    on_control_frames();
  } else if (got < 0 && code == EAGAIN) {
    control_.readable = false;
    emptied_ = now;
  } else if (got == 0 || code != EINTR) {
    control_.ended = true;
    if (session_.life.state() == ConnectionLifecycle::Open)
      throw_lost(got == 0 ? "its connection was closed" : std::strerror(code));
  }
}

void Peer::on_control_frames() {
  std::string_view rest = control_.in;
  while (rest.size() >= kFrameBytes) {
    auto frame = decode(rest.substr(0, kFrameBytes), Channel::Control, session_.shared.checksum);
    if (!frame) throw garbage(session_.shared, session_.rank, "something that is no frame of syncengine's");
    if (rest.size() < kFrameBytes + frame->payload) break;
    session_.on_control(*frame, rest.substr(kFrameBytes, frame->payload));
    rest.remove_prefix(kFrameBytes + frame->payload);
  }
  control_.in.erase(0, control_.in.size() - rest.size());
}

void Peer::write_control() {
  ssize_t sent = send(control_.fd.get(), session_.out.data() + control_.written, session_.out.size() - control_.written,
                      MSG_NOSIGNAL);
  if (sent < 0) {
    if (errno == EINTR) return;
    control_.writable = false;
    if (errno == EAGAIN || session_.life.state() != ConnectionLifecycle::Open) return;
    if (errno != EPIPE && errno != ECONNRESET) throw_lost(std::strerror(errno));
    control_.readable = true;  // the peer's last words come first, then the end
    return;
  }
  control_.written += static_cast<size_t>(sent);
  if (control_.written == session_.out.size() || control_.written >= kKeepWritten) {
    session_.out.erase(0, control_.written);
    control_.written = 0;
  }
}

void Peer::read_data(DataChannel& channel) {
  bool heard = channel.read(session_.shared.scratch);
  if (channel.status != Status::Open) return on_end(channel);
  if (!heard) return;
  session_.heartbeat.heard();
  for (;;) {
    if (Arrival* arrival = channel.ended_frame()) {
      const Frame& frame = arrival->frame;
      std::byte* place = arrival->place();
      if (session_.shared.checksum && place && crc32c(place, frame.payload) != frame.checksum)
        throw garbage(session_.shared, session_.rank, "data whose checksum differs");
      session_.inbox.end(*arrival);
      channel.receive(std::nullopt);
    } else if (auto header = channel.begun_frame(); header && !channel.is_reading()) {
      auto frame = decode(*header, Channel::Data, session_.shared.checksum);
      if (!frame) throw garbage(session_.shared, session_.rank, "something that is no frame of syncengine's");
      channel.receive(session_.inbox.begin(*frame));
    } else {
      return;
    }
  }
}

void Peer::write_data(DataChannel& channel) {
  if (!channel.is_writing()) {
    if (!session_.outbox.has_next()) return;
    channel.start(session_.outbox.next(channel.piece_bytes()), session_.shared.checksum);
  }
  if (auto piece = channel.write()) session_.outbox.written(*piece);
  if (channel.status == Status::Broken) on_end(channel);
}

// Handles the end of one data connection. If the peer has left in order, the control connection says so, or will soon.
void Peer::on_end(DataChannel& channel) {
  if (channel.status == Status::Broken && how_broken_.empty()) how_broken_ = std::strerror(errno);
  if (!broken_) broken_ = Clock::now();
}

void Peer::beat() {
  if (session_.life.is_in_use()) session_.add({.kind = Kind::Heartbeat});
}

void Peer::look_at_clock(Clock::time_point now) {
  if (!session_.life.is_in_use()) return;
  if (broken_ && session_.life.state() == ConnectionLifecycle::Open && now - *broken_ > kGoodbyeDelay)
    throw_lost(how_broken_.empty() ? "a connection was closed" : how_broken_);
  session_.heartbeat.judge(now);
}

void Peer::throw_lost(const std::string& how) const {
  throw Error(ErrorKind::PeerLost, session_.name() + " died, or the network to it broke (" + how + ")");
}

void Peer::fail(const Error& error) {
  if (session_.life.state() == ConnectionLifecycle::Open) {  // if anybody may hear it, and if it fits at once
    session_.add_abort(error);
    (void)!send(control_.fd.get(), session_.out.data() + control_.written, session_.out.size() - control_.written,
                MSG_NOSIGNAL);
    lost_ = boot_time();
  }
  session_.life.on(ConnectionLifecycle::Break);
  session_.outbox.fail(error);
  session_.inbox.fail(error);
  for (auto& channel : data_) {
    if (Send* send = channel.writing()) send->fail(error);
    channel.close();
  }
  control_.fd.reset();
  session_.shared.news = true;
}

void Peer::take_leave(const Error& error) {
  session_.take_leave(error);
  session_.add(matching::goodbye());
}

// Ends the connections once everything that was to be sent on them has been.
void Peer::say_goodbye() {
  if (has_unsent()) return;
  shutdown(control_.fd.get(), SHUT_WR);
  for (auto& channel : data_) channel.end_writing();
  session_.life.on(ConnectionLifecycle::SayGoodbye);
}

bool Peer::gone() const {
  return session_.life.is_broken() ||
         (control_.ended && std::ranges::count(data_, Status::Open, &DataChannel::status) == 0);
}

bool Peer::is_missed() const { return lost_ && boot_time() - *lost_ < kMissed * heartbeat_; }

bool Peer::has_just_ended(int epoll) {
  const bool is_refused = lost_ && probe_.is_refused(epoll), was_missed = is_missed();
  if (is_refused || !was_missed) lost_.reset(), probe_.end();
  return is_refused && boot_time() - heard_ < kBelieved * heartbeat_;
}

}  // namespace syncengine::tcp
