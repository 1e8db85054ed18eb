// Frames that nobody honest would send, a million of them, the same each time: nothing is read or written out of bounds
// (which AddressSanitizer sees), nothing is held beyond the window, and what is refused is refused with an error that
// names the rank.
#include <sys/socket.h>

#include <map>
#include <random>

#include "test.h"
#include "transport/tcp/peer.h"

namespace syncengine::tcp {

using testing::contains;

namespace {

using Random = std::mt19937_64;

uint64_t some_number(Random& random) {
  constexpr uint64_t kEdges[] = {0,           1,     2,     63,      64,         kEagerBytes,     kEagerBytes + 1,
                                 kChunkBytes, 65536, 65537, 1 << 20, 0xffffffff, kChunkBytes * 3, (1 << 20) + 1,
                                 ~uint64_t{0}};
  switch (random() % 4) {
    case 0: return random() % 8;
    case 1: return kEdges[random() % std::size(kEdges)];
    case 2: return random() % (1 << 20);
    default: return random() >> random() % 64;
  }
}

// Likelier to be valid than not, so that what lies behind decode() is reached.
Frame some_frame(Random& random) {
  Frame frame{.kind = static_cast<Kind>(random() % 10)};
  switch (frame.kind) {
    case Kind::Message: frame.payload = some_number(random) % 4096; break;
    case Kind::Abort: frame.payload = random() % 100, frame.size = random() % 5; break;
    case Kind::Ready:
      frame.tag = random() % 8, frame.handle = 1 + random() % 9, frame.size = some_number(random);
      break;
    case Kind::Ask: frame.tag = random() % 8; break;
    case Kind::Withdrawn:
      frame.tag = random() % 8, frame.handle = frame.tag + random() % 4, frame.size = some_number(random) % 50;
      break;
    case Kind::Credit: frame.size = random() % 4096; break;
    case Kind::Eager: frame.tag = random() % 8, frame.payload = random() % 2 ? 100 : some_number(random) % 20000; break;
    case Kind::Chunk:
      frame.handle = 1 + random() % 6;
      frame.offset = random() % 2 ? kChunkBytes * (random() % 5) : kChunkUnit * (random() % 17);
      frame.payload = random() % 4 ? kChunkBytes : random() % 2 ? kChunkUnit * (random() % 5) : some_number(random);
      break;
    default: break;
  }
  if (random() % 16 == 0) frame.payload = some_number(random);
  if (random() % 32 == 0) frame.size = some_number(random);
  if (random() % 32 == 0) frame.handle = some_number(random);
  if (random() % 32 == 0) frame.offset = some_number(random);
  if (random() % 32 == 0) frame.tag = some_number(random);
  return frame;
}

std::string some_header(Random& random, bool checksum = false) {
  std::string bytes = encode(some_frame(random), checksum);
  if (random() % 8 == 0) bytes[random() % bytes.size()] ^= static_cast<char>(1 + random() % 255);
  if (random() % 64 == 0) bytes.resize(random() % 80);
  return bytes;
}

std::shared_ptr<Interhost::Transfer> transfer() { return std::make_shared<Interhost::Transfer>(); }

const std::vector<std::byte> memory(1 << 20);

// Memory of exactly this size for a message with this tag. Sessions share it: under AddressSanitizer, new memory for
// each would take most of the time.
std::byte* place_for(uint64_t tag, size_t bytes) {
  static std::map<std::pair<uint64_t, size_t>, std::unique_ptr<std::byte[]>> places;
  auto& place = places[{tag, bytes}];
  if (!place) place = std::make_unique_for_overwrite<std::byte[]>(bytes);
  return place.get();
}

// What a rank has under way with a peer that sends anything.
struct Session {
  Shared shared{.rank = 0};
  std::string control;
  Withdrawals withdrawals{shared, 1};
  Outbox outbox{shared, 1, control, withdrawals};
  Inbox inbox{shared, 1, control, withdrawals};
  std::vector<std::shared_ptr<Interhost::Transfer>> transfers;

  explicit Session(Random& random) {
    for (uint64_t tag = 0; tag < 4; ++tag) {
      size_t bytes = random() % 3 ? 100 : random() % 2 ? (1 << 20) : 300000;
      transfers.push_back(transfer());
      inbox.post(tag, place_for(tag, bytes), bytes, transfers.back());
      transfers.push_back(transfer());
      outbox.post(tag, memory.data(), some_number(random) % ((1 << 20) + 1), transfers.back());
    }
  }
  ~Session() {
    Error error(ErrorKind::Aborted, "over");
    outbox.fail(error);
    inbox.fail(error);
  }

  void give(const Frame& frame) {
    switch (frame.kind) {
      case Kind::Ready: outbox.on_ready(frame); break;
      case Kind::Credit: outbox.on_credit(frame); break;
      case Kind::Ask: inbox.on_ask(frame); break;
      case Kind::Withdrawn: withdrawals.hear(frame); break;
      case Kind::Eager:
      case Kind::Chunk: {
        Arrival arrival = inbox.begin(frame);
        // At both ends only: a whole chunk would take a million times 256 KiB.
        if (std::byte* place = arrival.place(); place && frame.payload > 0) {
          place[0] = std::byte{1};
          place[frame.payload - 1] = std::byte{1};
        }
        inbox.end(arrival);
        break;
      }
      default: break;
    }
  }
  void send_some() {
    for (int i = 0; i < 3 && outbox.has_next(); ++i) {
      OutgoingPiece piece = outbox.next();
      CHECK(decode(encode(piece.frame, false), Channel::Data, false) == piece.frame);
      if (piece.frame.payload > 0) {
        volatile std::byte first = piece.payload()[0], last = piece.payload()[piece.frame.payload - 1];
        (void)first, (void)last;
      }
      outbox.written(piece);
    }
  }
};

}  // namespace

TEST(tcp_fuzz_a_million_frames) {
  Random random(5);
  auto session = std::make_unique<Session>(random);
  int refused = 0, taken = 0, sessions = 0;
  for (int i = 0; i < 1000000; ++i) {
    std::string bytes = some_header(random);
    auto channel = random() % 8 ? (static_cast<unsigned char>(bytes.size() > 4 ? bytes[4] : 0) >= 7 ? Channel::Data
                                                                                                    : Channel::Control)
                                : static_cast<Channel>(random() % 2);
    auto frame = decode(bytes, channel, false);
    if (!frame) {
      ++refused;
      continue;
    }
    CHECK(encode(*frame, false) == bytes);
    try {
      session->give(*frame);
      session->send_some();
      ++taken;
      if (session->control.size() > (1 << 16)) session->control.clear();
    } catch (const Error& error) {
      CHECK(contains(error.what(), "rank 1"));
      session = std::make_unique<Session>(random);
      ++sessions;
    }
  }
  CHECK(refused > 100000 && taken > 100000 && sessions > 10000);  // it reaches what it is for
}

// The same through sockets, cut anywhere: headers, payloads and readiness interleave.
TEST(tcp_fuzz_streams) {
  Random random(6);
  const int streams = 3000 / testing::kSlowdown;
  int lost = 0;
  for (int i = 0; i < streams; ++i) {
    std::vector<ParentFd> ours;
    std::vector<UniqueFd> theirs;
    for (int connection = 0; connection < 2; ++connection) {
      int pair[2];
      CHECK_EQ(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0, pair), 0);
      ours.emplace_back([&] { return pair[0]; });
      theirs.emplace_back(pair[1]);
    }
    Options options;
    Shared shared{.rank = 0};
    shared.checksum = random() % 4 == 0;
    Peer peer(shared, options, 1, tcp::Probe({}, {}, 0), std::move(ours));
    for (uint64_t tag = 0; tag < 4; ++tag) {
      size_t bytes = random() % 2 ? 100 : 20000;
      peer.session().inbox.post(tag, place_for(tag, bytes), bytes, transfer());
      peer.session().outbox.post(tag, memory.data(), random() % 40000, transfer());
    }
    try {
      for (int step = 0; step < 40; ++step) {
        size_t connection = random() % 2;
        std::string bytes = some_header(random, shared.checksum);
        if (bytes.size() > 4 && !shared.checksum)
          bytes[4] = static_cast<char>(connection ? 8 + random() % 2 : random() % 8);
        bytes.append(random() % 3 ? random() % 200 : random() % 20000, 'x');
        bytes.resize(random() % 4 ? bytes.size() : random() % (bytes.size() + 1));
        (void)!send(theirs[connection].get(), bytes.data(), bytes.size(), MSG_NOSIGNAL);
        if (random() % 20 == 0) theirs[random() % 2].reset();
        if (random() % 10 == 0) peer.withdraw(random() % 4, random() % 4, {ErrorKind::Aborted, "enough"});
        char drain[4096];
        for (auto& fd : theirs) (void)!recv(fd.get(), drain, sizeof(drain), 0);
        for (size_t each = 0; each < 2; ++each) peer.on_event(each, 0x2005);  // EPOLLIN | EPOLLOUT | EPOLLRDHUP
        peer.step();
      }
    } catch (const Error& error) {
      CHECK(contains(error.what(), "rank 1"));
      ++lost;
    }
    peer.fail({ErrorKind::PeerLost, "over"});
  }
  CHECK(lost > streams / 4);
}

}  // namespace syncengine::tcp
