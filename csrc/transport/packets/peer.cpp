#include "transport/packets/peer.h"

#include <algorithm>
#include <cassert>
#include <cstring>
#include <mutex>

namespace syncengine::packets {

PacketTraffic::~PacketTraffic() {
  static std::mutex mutex;
  static auto* kept = new std::vector<std::unordered_map<uint64_t, PostedPacket>>;  // reachable, never deleted
  std::lock_guard lock(mutex);
  if (!in_flight_.empty()) kept->push_back(std::move(in_flight_));
}

uint64_t PacketTraffic::post(int peer, bool outgoing, Buffer buffer, size_t bytes) {
  posts_.push_back({++last_, peer, outgoing, buffer.get(), bytes});
  in_flight_.emplace(last_, PostedPacket{peer, std::move(buffer)});
  return last_;
}

PacketTraffic::PostedPacket PacketTraffic::end(uint64_t id) {
  auto found = in_flight_.extract(id);
  assert(!found.empty());
  return std::move(found.mapped());
}

using matching::Arrival, matching::Channel, matching::ConnectionLifecycle, matching::Frame, matching::Kind;
using matching::encode, matching::garbage, matching::kFrameBytes;

namespace {

constexpr size_t kRoom = kControlBytes - sizeof(uint32_t);  // behind the count of the bytes that are used
constexpr uint32_t kInlineBytes = 512;  // up to which a payload travels with its frame, without a packet of its own
constexpr int kMostAnnounced = 4;       // payloads announced by one packet of frames; more would hold up messages
constexpr size_t kMostOutgoing = 16;    // packets under way

bool is_inline(const Frame& frame) { return frame.payload <= kInlineBytes; }

Buffer memory_of(size_t bytes) { return std::make_unique_for_overwrite<std::byte[]>(bytes); }

bool is_data(Kind kind) { return kind == Kind::Eager || kind == Kind::Chunk; }

}  // namespace

Peer::Peer(matching::Shared& shared, PacketTraffic& traffic, const Options& options, int rank)
    : session_(shared, options.timing, rank), traffic_(traffic), options_(options) {
  receive(kControlBytes, {});
}

// ---- out ----

void Peer::step() {
  while (session_.life.may_send() && outgoing_ + 1 + kMostAnnounced <= kMostOutgoing) {
    if (session_.out.empty() && !session_.outbox.has_next()) {
      if (session_.life.is_in_use()) return;
      session_.life.on(ConnectionLifecycle::SayGoodbye);
      session_.out = encode(matching::goodbye(), session_.shared.checksum);
    }
    send_packet();
  }
}

// Sends frames of `session_.out` first, so that no message waits behind more payloads than those already announced.
void Peer::send_packet() {
  Buffer packet = memory_of(kControlBytes);
  auto* start = reinterpret_cast<char*>(packet.get()) + sizeof(uint32_t);
  size_t used = session_.out.copy(start, kRoom);
  session_.out.erase(0, used);
  auto add = [&](const void* bytes, size_t count) {
    if (count > 0) std::memcpy(start + used, bytes, count);
    used += count;
  };
  std::vector<std::pair<Buffer, size_t>> payloads;
  while (session_.out.empty() && session_.outbox.has_next() && payloads.size() < kMostAnnounced &&
         used + kFrameBytes + kInlineBytes <= kRoom) {
    matching::OutgoingPiece piece = session_.outbox.next();
    add(encode(piece.frame, session_.shared.checksum).data(), kFrameBytes);
    if (is_inline(piece.frame)) {
      add(piece.payload(), piece.frame.payload);
    } else {
      payloads.emplace_back(memory_of(piece.frame.payload), piece.frame.payload);
      std::memcpy(payloads.back().first.get(), piece.payload(), piece.frame.payload);
    }
    session_.outbox.written(piece);
  }
  auto count = static_cast<uint32_t>(used);
  std::memcpy(packet.get(), &count, sizeof(count));
  std::memset(start + used, 0, kRoom - used);  // other memory of this process must not leave it
  send(std::move(packet), kControlBytes);
  for (auto& [buffer, bytes] : payloads) send(std::move(buffer), bytes);
}

void Peer::send(Buffer buffer, size_t bytes) {
  traffic_.post(session_.rank, true, std::move(buffer), bytes);
  ++outgoing_;
}

// ---- in ----

void Peer::receive(size_t bytes, std::optional<Arrival> arrival) {
  uint64_t id = traffic_.post(session_.rank, false, memory_of(bytes), bytes);
  incoming_.push_back({.id = id, .arrival = std::move(arrival)});
}

void Peer::on_end(uint64_t id, Buffer buffer, const std::string& error) {
  if (!error.empty()) {
    session_.life.on(ConnectionLifecycle::Break);
    throw Error(ErrorKind::PeerLost,
                session_.name() + " died, or the way to it broke (" + options_.by + ": " + error + ")");
  }
  auto ended =
      std::find_if(incoming_.begin(), incoming_.end(), [&](const PostedReceive& each) { return each.id == id; });
  if (ended == incoming_.end()) {
    --outgoing_;
    return;
  }
  session_.heartbeat.heard();
  ended->ended = true;
  ended->buffer = std::move(buffer);
  std::optional<Error> fault;
  while (!incoming_.empty() && incoming_.front().ended && !session_.life.is_broken()) {
    PostedReceive next = std::move(incoming_.front());
    incoming_.pop_front();
    try {
      if (next.arrival)
        take_data(*next.arrival, next.buffer.get());
      else
        on_frames(next.buffer.get());
    } catch (const Error& error) {
      if (!fault) fault = error;
      session_.life.on(ConnectionLifecycle::Leave);
    }
  }
  if (fault) throw Error(*fault);
}

// Reads all frames of a packet even if one is faulty, since the payloads that they announce are sent anyway, and so is
// the Goodbye. The first fault is thrown at the end.
void Peer::on_frames(const std::byte* packet) {
  uint32_t used;
  std::memcpy(&used, packet, sizeof(used));
  if (used > kRoom) throw_out_of_step();
  in_.append(reinterpret_cast<const char*>(packet) + sizeof(used), used);
  announced_ = 0;
  std::optional<Error> fault;
  std::string payload;
  while (auto frame = next_frame(payload)) {
    try {
      on_frame(*frame, payload);
    } catch (const Error& error) {
      if (session_.life.is_broken()) throw;
      if (!fault) fault = error;
      session_.life.on(ConnectionLifecycle::Leave);
    }
  }
  if (!session_.life.has_peer_left()) receive(kControlBytes, {});
  if (fault) throw Error(*fault);
}

// Takes the next frame, with its payload unless that is a packet of its own.
std::optional<Frame> Peer::next_frame(std::string& payload) {
  if (in_.size() < kFrameBytes) return {};
  std::string_view header(in_.data(), kFrameBytes);
  const bool checksum = session_.shared.checksum;
  auto frame = decode(header, Channel::Control, checksum);
  if (!frame) frame = decode(header, Channel::Data, checksum);
  if (!frame) throw_out_of_step();
  size_t behind = is_data(frame->kind) && !is_inline(*frame) ? 0 : frame->payload;
  if (in_.size() < kFrameBytes + behind) return {};
  payload.assign(in_, kFrameBytes, behind);
  in_.erase(0, kFrameBytes + behind);
  return frame;
}

void Peer::on_frame(const Frame& frame, const std::string& payload) {
  if (is_data(frame.kind)) {
    if (!is_inline(frame) && ++announced_ > kMostAnnounced) throw_out_of_step();
    Arrival arrival{.frame = frame};
    try {
      if (session_.life.is_in_use()) arrival = session_.inbox.begin(frame);
    } catch (const Error&) {
      if (!is_inline(frame)) receive(frame.payload, std::move(arrival));  // its payload is sent anyway
      throw;
    }
    if (is_inline(frame)) return take_data(arrival, reinterpret_cast<const std::byte*>(payload.data()));
    return receive(frame.payload, std::move(arrival));
  }
  if (frame.kind == Kind::Goodbye || session_.life.is_in_use()) session_.on_control(frame, payload);
  if (frame.kind == Kind::Goodbye && session_.life.is_in_use())
    throw Error(ErrorKind::PeerLost, session_.name() + " has left (it exited, or called syncengine.shutdown())");
}

void Peer::take_data(Arrival& arrival, const std::byte* payload) {
  if (!session_.life.is_in_use()) return;
  const Frame& frame = arrival.frame;
  std::byte* place = arrival.place();
  if (session_.shared.checksum && matching::crc32c(payload, frame.payload) != frame.checksum)
    throw garbage(session_.shared, session_.rank, "data whose checksum differs");
  if (place && frame.payload > 0) std::memcpy(place, payload, frame.payload);
  session_.inbox.end(arrival);
}

// Throws PeerLost and leaves the connection Broken: a stream that is no sequence of frames can't be received further.
void Peer::throw_out_of_step() {
  session_.life.on(ConnectionLifecycle::Break);
  throw garbage(session_.shared, session_.rank, "something that is no frame of syncengine's");
}

// ---- the end ----

void Peer::beat() {
  if (options_.timing.is_judged() && session_.life.is_in_use() && session_.out.empty() && outgoing_ == 0)
    session_.add({.kind = Kind::Heartbeat});
}

void Peer::look_at_clock(Clock::time_point now) {
  if (session_.life.is_in_use()) session_.heartbeat.judge(now);
}

void Peer::fail(const Error& error) {
  session_.life.on(ConnectionLifecycle::Leave);
  session_.outbox.fail(error);
  session_.inbox.fail(error);
  if (!session_.life.is_broken() && !session_.life.has_peer_left()) session_.add_abort(error);
  session_.shared.news = true;
}

bool Peer::gone() const {
  return session_.life.is_broken() ||
         (session_.life.state() == ConnectionLifecycle::Parted && outgoing_ == 0 && incoming_.empty());
}

}  // namespace syncengine::packets
