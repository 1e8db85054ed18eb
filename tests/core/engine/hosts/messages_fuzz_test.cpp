// Messages between hosts that nobody honest would send: nothing is read or written out of bounds (which
// AddressSanitizer sees), what is kept is bounded, and what is refused is refused with an error.
//
// SYNCENGINE_TEST_MESSAGES=10000000 sends so many, other ones for each number.
#include <condition_variable>
#include <cstdlib>
#include <deque>
#include <random>

#include "engine/communicator/engine_communicator.h"
#include "engine/hosts/interhost_members.h"
#include "job.h"
#include "test.h"

namespace syncengine::hosts {

using testing::contains;

namespace {

using Random = std::mt19937_64;

constexpr int kRanks = 3;  // each on a host of its own

// The test is what the others say; transfers end at once. While it is honest, each says what this rank says.
class Mouth final : public Interhost {
 public:
  explicit Mouth(int rank) : me(rank) {}

  std::shared_ptr<Transfer> send(int, uint64_t, const std::byte*, size_t) override { return done(); }
  std::shared_ptr<Transfer> receive(int, uint64_t, std::byte* data, size_t bytes) override {
    std::memset(data, 0, bytes);
    return done();
  }
  void tell(int peer, const std::string& message) override {
    std::lock_guard lock(mutex_);
    if (said_.size() < 64) said_.push_back(message);
    if (honest_) heard_.push_back({peer, message});
  }
  std::optional<Message> hear() override {
    std::lock_guard lock(mutex_);
    if (heard_.empty()) return {};
    Message message = std::move(heard_.front());
    heard_.pop_front();
    return message;
  }
  std::optional<Error> failure(int) const override { return {}; }
  void withdraw(const std::vector<int>&, uint64_t, uint64_t, const Error&) override {}
  void run(const std::function<void()>&) override {
    std::unique_lock lock(mutex_);
    stopped_.wait(lock, [&] { return stopping_; });
  }
  void stop() override {
    std::lock_guard lock(mutex_);
    stopping_ = true;
    stopped_.notify_all();
  }

  void say(int peer, const std::string& message) {
    std::lock_guard lock(mutex_);
    heard_.push_back({peer, message});
  }
  void be_honest(bool honest) {
    std::lock_guard lock(mutex_);
    honest_ = honest;
    said_.clear();
  }
  // What this rank has said since.
  std::string said(Random& random) {
    std::lock_guard lock(mutex_);
    return said_.empty() ? std::string(8, '\0') : said_[random() % said_.size()];
  }
  // This rank's own operation with that number.
  std::optional<Opened> opened(uint64_t lane, uint64_t number) {
    std::lock_guard lock(mutex_);
    for (const std::string& each : said_) {
      Opened opened;
      if (each.size() != sizeof(opened)) continue;
      std::memcpy(&opened, each.data(), sizeof(opened));
      if (opened.head.kind == Kind::Opened && opened.lane == lane && opened.number == number) return opened;
    }
    return {};
  }
  int other(Random& random) const { return (me + 1 + static_cast<int>(random() % 2)) % kRanks; }

  const int me;

 private:
  static std::shared_ptr<Transfer> done() {
    auto transfer = std::make_shared<Transfer>();
    transfer->finish();
    return transfer;
  }

  mutable std::mutex mutex_;
  std::condition_variable stopped_;
  bool stopping_ = false, honest_ = true;
  std::vector<std::string> said_;
  std::deque<Message> heard_;
};

struct Rank {
  explicit Rank(int rank) : me(rank), engine(new Engine(arena, 1, {}, {}), &Engine::destroy) {
    engine->attach(std::vector<std::unique_ptr<shm::PeerArena>>(1), 0, {me}, {});
    auto interhost = std::make_unique<Mouth>(me);
    mouth = interhost.get();
    network = {new Network(engine, std::move(interhost)), &Network::destroy};
    engine->locked([&] { network->enroll(kJobGroup, nullptr), network->forget(kJobGroup); });
  }
  std::shared_ptr<EngineCommunicator> communicator(uint32_t group) const {
    Placement placement(me, {0, 1, 2});
    auto parts = std::make_unique<InterhostMembers>(network, group, placement, std::vector<int>{0, 1, 2},
                                                    std::vector<int>{0, 1, 2});
    auto members = Members::make(*engine, std::move(placement), {0, 1, 2}, {0},
                                 {arena->allocate_group(sizeof(shm::GroupBlock))}, std::move(parts));
    return std::make_shared<EngineCommunicator>(engine, std::move(members), Membership::Origin::Split);
  }

  const int me;
  std::shared_ptr<shm::Arena> arena = shm::Arena::create(1 << 30);
  std::shared_ptr<Engine> engine;
  Mouth* mouth;
  std::shared_ptr<Network> network;
};

// A communicator with all kinds of calls under way.
struct Session {
  static constexpr size_t kSlots = 40, kBig = 3 << 20;

  Session(const Rank& rank, uint32_t number, Random& random) : group(number), communicator(rank.communicator(number)) {
    rank.mouth->be_honest(true);
    slots = communicator->reserve_slots(kSlots, {}, {});
    rank.mouth->be_honest(false);
    for (auto& each : memory) each.resize(1000);
    for (size_t i = 0; i < 3; ++i) {
      works.push_back(communicator->submit(testing::all_reduce_of(memory[i])));
      Operation announced = testing::all_reduce_of(memory[3 + i]);
      if (i == 0) announced.flags = flags, announced.flag_words = shm::kFlagWords;
      works.push_back(communicator->announce(slots, i, 1, std::move(announced)));
      Message message{.peer = random() % 2 ? Message::kAnySource : rank.mouth->other(random), .tag = i};
      message.memory.add(memory[6 + i].data(), i == 2 ? 100 : 4000);
      message.describe = [] { return std::string("recv()"); };
      works.push_back(communicator->receive(message));
      message.peer = rank.mouth->other(random);
      message.memory = SpanList(big(), i == 0 ? kBig : 100);
      works.push_back(communicator->send(message));
    }
    if (random() % 2) communicator->refuse(slots, 1, "it raised");
  }
  // The memory that all sessions send. Nobody writes to it, and new memory for each would take most of the time.
  static std::byte* big() {
    static const auto memory = std::make_unique<std::byte[]>(kBig);
    return memory.get();
  }
  bool has_failed() const {
    try {
      communicator->throw_if_failed();
      return false;
    } catch (const Error&) {
      return true;
    }
  }

  uint32_t group;
  std::vector<std::vector<float>> memory{9};
  uint64_t flags[shm::kFlagWords] = {};
  std::shared_ptr<EngineCommunicator> communicator;
  std::shared_ptr<const Slots> slots;
  std::vector<std::shared_ptr<Work>> works;
  uint64_t opened[kRanks][shm::kLanes] = {}, numbered[kRanks] = {}, scheduled = 0;
};

uint64_t some_number(Random& random) {
  switch (random() % 4) {
    case 0: return random() % 4;
    case 1: return random() % 300;
    case 2: return ~uint64_t{0} - random() % 4;
    default: return random() >> random() % 64;
  }
}

// Likelier to be sound than not, so that what lies behind the checks is reached.
std::string sound_message(Random& random, Session& session, Mouth& mouth, int peer) {
  const uint32_t group = session.group;
  const uint64_t lane = random() % shm::kLanes, slot = random() % (Session::kSlots + Slots::kBehind);
  auto kind = static_cast<Kind>(random() % 10);
  if ((kind == Kind::Ready && mouth.me != 0) || (kind == Kind::Scheduled && (mouth.me == 0 || peer != 0)) ||
      (kind == Kind::Ended && random() % 8))
    kind = Kind::Opened;
  switch (kind) {
    case Kind::Opened: {
      const uint64_t number = (lane == shm::kUserLane) + session.opened[peer][lane]++;
      auto own = mouth.opened(lane, number);
      return write(group, own ? *own : Opened{.lane = lane, .number = number});
    }
    case Kind::Flags: {
      const uint64_t number = (lane == shm::kUserLane) + session.opened[peer][lane];
      return write(group, Flags{.lane = lane, .number = number + random() % 4, .words = {random()}});
    }
    case Kind::Ready: return write(group, Ready{.slot = random() % 8 ? random() % 3 : slot, .step = 1});
    case Kind::Scheduled: return write(group, Scheduled{.slot = random() % 16 ? session.scheduled++ % 3 : slot});
    case Kind::Refused: {
      Refused refused{.first_slot = random() % 4 ? 0 : slot, .step = 1 + random() % 2};
      std::memset(refused.text, 'x', random() % (sizeof(refused.text) + 1));
      return write(group, refused) + std::string(random() % 8, static_cast<char>(random()));
    }
    case Kind::Late: return write(group, Late{.members = random() % 8});
    case Kind::Ended: {
      Ended ended{.standing = 1 + static_cast<uint32_t>(random() % 8 != 0),
                  .error = static_cast<uint32_t>(random() % 6)};
      std::memset(ended.text, 'x', random() % (sizeof(ended.text) + 1));
      return write(group, ended);
    }
    case Kind::Announced: {
      const uint64_t tag = random() % 4, bytes = tag == 3 ? 1 << 20 : tag == 2 ? 100 : 4000;
      Announced announced{.tag = tag, .bytes = bytes};
      if (bytes > kShortBytes) announced.number = session.numbered[peer]++;
      return write(group, announced) + std::string(bytes > kShortBytes ? 0 : bytes, 'x');
    }
    case Kind::Heard: return write(group, Heard{.count = random() % 16 == 0});
    default: return write(group, Shrinks{.verdict = {.members = random() % 8, .word = random() % 8}});
  }
}

std::string some_message(Random& random, Session& session, Mouth& mouth, int peer) {
  std::string message = random() % 64 ? sound_message(random, session, mouth, peer) : mouth.said(random);
  if (random() % 32 == 0) message[random() % message.size()] ^= static_cast<char>(1 + random() % 255);
  if (random() % 16 == 0 && message.size() >= 16) {
    const uint64_t number = some_number(random);
    std::memcpy(message.data() + 8 * (1 + random() % (message.size() / 8 - 1)), &number, sizeof(number));
  }
  if (random() % 128 == 0) message.resize(random() % (2 * message.size()));
  return message;
}

uint32_t next_group(uint32_t group) { return (group + (1 << kShrinkBits)) % kTooMany; }

size_t messages() {
  const char* wanted = std::getenv("SYNCENGINE_TEST_MESSAGES");
  return wanted ? std::strtoul(wanted, nullptr, 10) : 100000;
}

// Half of them.
void fuzz(int me) {
  Random random(messages() + static_cast<size_t>(me));
  Rank rank(me);
  size_t sessions = 0, sent = 0;
  for (uint32_t group = 0; sent < messages() / 2; ++sessions) {
    Session session(rank, group = next_group(group), random);
    for (int i = 0; i < 200 && !session.has_failed(); ++i, ++sent) {
      const int peer = rank.mouth->other(random);
      rank.mouth->say(peer, some_message(random, session, *rank.mouth, peer));
      rank.engine->progress();
      if (random() % 16 != 0) continue;
      rank.engine->locked([&] { rank.engine->progressables().check_health(); });
    }
  }
  CHECK(sessions > sent / 100 && sessions < sent / 4);  // some go on for long, and many are refused
}

}  // namespace

TEST(hosts_fuzz_messages_to_the_first_rank) { fuzz(0); }
TEST(hosts_fuzz_messages_to_the_last_rank) { fuzz(2); }

// One peer goes on and on: it is refused before this rank has kept much.
TEST(hosts_bound_what_a_peer_makes_them_keep) {
  struct Flood {
    const char* kind;
    int me;
    size_t most;
    std::function<std::string(uint64_t i, uint32_t group)> message;
  };
  constexpr size_t kExpected = Session::kSlots + Slots::kBehind;
  const std::vector<Flood> floods = {
      {"opened", 0, 2 * shm::kRecords,
       [](uint64_t i, uint32_t group) { return write(group, Opened{.lane = shm::kScheduledLane, .number = i}); }},
      {"ready", 0, kExpected, [](uint64_t i, uint32_t group) { return write(group, Ready{.slot = i, .step = 1}); }},
      {"scheduled", 2, 3,  // the buckets that this rank has announced
       [](uint64_t i, uint32_t group) { return write(group, Scheduled{.slot = i}); }},
      {"refused", 0, 64,
       [](uint64_t i, uint32_t group) {
         return write(group, Refused{.first_slot = i, .step = 2}) + std::string(10, 'x');
       }},
      {"long refused", 0, 0,
       [](uint64_t, uint32_t group) {
         return write(group, Refused{.first_slot = 0, .step = 2}) + std::string(kExpected / 8 + 2, 'x');
       }},
      {"announced", 0, 1 << 14,
       [](uint64_t i, uint32_t group) { return write(group, Announced{.tag = 99, .bytes = 1 << 20, .number = i}); }},
      {"early", 0, 16,
       [](uint64_t, uint32_t group) { return write(next_group(group), Late{}) + std::string(1 << 16, 'x'); }}};
  for (const Flood& flood : floods) {
    Random random(1);
    Rank rank(flood.me);
    rank.engine->locked([&] { rank.network->expect(); });
    Session session(rank, next_group(0), random);
    size_t taken = 0;
    for (; !session.has_failed() && taken <= flood.most + 1; ++taken) {
      rank.mouth->say(flood.me == 0 ? 1 : 0, flood.message(taken, session.group));  // rank 0 leads the job
      rank.engine->progress();
    }
    if (taken > flood.most + 1) testing::fail(__FILE__, __LINE__, std::string(flood.kind) + " is not bounded");
    if (taken <= flood.most / 2) testing::fail(__FILE__, __LINE__, std::string(flood.kind) + " is refused too early");
  }
}

}  // namespace syncengine::hosts
