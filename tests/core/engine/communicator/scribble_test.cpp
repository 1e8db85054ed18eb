// One of three ranks, which are processes, writes any numbers into control words of the shared memory, its own or a
// peer's, while all work: nobody crashes, and nobody hangs. That results are right is not to be expected then. Not into
// the mutexes by which peers notice a death, which docs/SECURITY.md excepts.
//
// SYNCENGINE_TEST_SCRIBBLES=50000 writes so many words, other ones for each number.
#include <sys/mman.h>

#include <atomic>
#include <cstddef>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <random>
#include <string>
#include <vector>

#include "child.h"
#include "job.h"
#include "test.h"
#include "transport/shm/layout.h"

namespace syncengine {

using testing::start_child, testing::was_true;

namespace {

using Random = std::mt19937_64;
using shm::ArenaHeader, shm::GroupBlock, shm::LaneBlock, shm::Mailboxes;

constexpr int kRanks = 3;

struct Words {
  const char* name;
  size_t begin, bytes;
  bool in_block;  // of the communicator; else of the arena
};

std::vector<Words> all_words() {
  std::vector<Words> words = {
      {"pool", offsetof(ArenaHeader, pool_offset), 16, false},
      {"doorbell", offsetof(ArenaHeader, doorbell), sizeof(shm::Doorbell), false},
      {"board", offsetof(ArenaHeader, board), sizeof(shm::WaitBoard), false},
      {"end record", offsetof(GroupBlock, end_record), sizeof(shm::EndRecord), true},
      {"standing", offsetof(GroupBlock, end_record), 8, true},
      {"succession", offsetof(GroupBlock, succession), 24, true},
      {"gone", offsetof(GroupBlock, gone), 8, true},
      {"refusals", offsetof(GroupBlock, refusals), 16, true},
      {"schedule", offsetof(GroupBlock, schedule), sizeof(shm::ScheduleLog), true},
      {"announced", offsetof(GroupBlock, announced), 4096, true},
      {"outboxes", offsetof(GroupBlock, messages) + offsetof(Mailboxes, out), kRanks * sizeof(shm::OutboxWords), true},
      {"inboxes", offsetof(GroupBlock, messages) + offsetof(Mailboxes, in), kRanks * sizeof(shm::InboxWords), true}};
  for (size_t lane = 0; lane < shm::kLanes; ++lane) {
    const size_t at = offsetof(GroupBlock, lanes) + lane * sizeof(LaneBlock);
    words.push_back({"progress", at + offsetof(LaneBlock, progress), sizeof(shm::LaneProgress), true});
    words.push_back({"records", at + offsetof(LaneBlock, records), sizeof(LaneBlock::records), true});
    words.push_back({"spans", at + offsetof(LaneBlock, span_offsets), 8 * shm::kMaxSpans * 8, true});
    words.push_back({"flags", at + offsetof(LaneBlock, flags), 8 * shm::kFlagWords * 8, true});
    words.push_back({"noted", at + offsetof(LaneBlock, noted), sizeof(LaneBlock::noted), true});
  }
  return words;
}

struct Trial {
  unsigned number;
  Words words;
  int count;  // of words that are overwritten, at a time
  bool again, dies, refuses;
};

// Where the ranks of a trial meet.
struct Meeting {
  std::atomic<int> come;
  char addresses[kRanks][1024];
  size_t sizes[kRanks];
};

uint64_t some_word(Random& random) {
  switch (random() % 6) {
    case 0: return random();
    case 1: return random() % 300;
    case 2: return ~uint64_t{0} - random() % 4;
    case 3: return random() >> 31;
    case 4: return uint64_t{1} << random() % 64;
    default: return 0;
  }
}

std::vector<std::byte*> arenas() {
  std::vector<std::byte*> found;
  FILE* maps = std::fopen("/proc/self/maps", "r");
  char line[512];
  while (std::fgets(line, sizeof(line), maps)) {
    unsigned long begin = 0, offset = 0;
    char mode[5] = "";
    if (std::strstr(line, "memfd:syncengine ") && std::sscanf(line, "%lx-%*x %4s %lx", &begin, mode, &offset) == 3 &&
        offset == 0 && mode[3] == 's')
      found.push_back(reinterpret_cast<std::byte*>(begin));
  }
  std::fclose(maps);
  return found;
}

void scribble(const Trial& trial, Random& random, size_t block) {
  const auto all = arenas();
  for (int i = 0; i < trial.count; ++i) {
    std::byte* word = all.at(random() % all.size()) + (trial.words.in_block ? block : 0) + trial.words.begin +
                      random() % (trial.words.bytes / 8) * 8;
    __atomic_store_n(reinterpret_cast<uint64_t*>(word), some_word(random), __ATOMIC_RELAXED);
  }
}

// All kinds of calls.
void work(Communicator& communicator, const std::shared_ptr<const Slots>& slots, const Trial& trial, uint64_t step) {
  const int rank = communicator.rank();
  std::vector<float> staged(5000, 1), announced(300, 1);
  auto direct = communicator.allocate(40000);
  std::vector<std::shared_ptr<Work>> works;
  const bool refuses = trial.refuses && step % 3 == 0 && rank == 0;
  for (size_t i = 0; i < 2 && !refuses; ++i)
    works.push_back(communicator.announce(slots, i, step, testing::all_reduce_of(announced.data() + 100 * i, 400)));
  works.push_back(communicator.submit(testing::all_reduce_of(staged)));
  works.push_back(communicator.submit(testing::all_reduce_of(direct.get(), 40000)));
  std::vector<std::byte> sent(300000), received(300000);
  for (size_t bytes : {size_t{100}, sent.size()}) {
    Message message{.peer = (rank + 1) % kRanks, .tag = bytes};
    message.describe = [] { return std::string("a message"); };
    message.memory.add(sent.data(), bytes);
    works.push_back(communicator.send(message));
    message.peer = (rank + kRanks - 1) % kRanks;
    message.memory = SpanList(received.data(), bytes);
    works.push_back(communicator.receive(message));
  }
  auto how = std::make_shared<uint8_t>();
  if (refuses) communicator.refuse(slots, step, "it raised");
  if (trial.refuses && step % 3 == 0) works.push_back(communicator.end_refused(slots, step, how));
  std::exception_ptr error;
  for (const auto& each : works) {  // all of them: their memory is on this stack
    try {
      communicator.wait(each, {}, {});
    } catch (const StepRefused&) {
    } catch (const Error&) {
      error = std::current_exception();
    }
  }
  if (error) std::rethrow_exception(error);
}

bool run_rank(int rank, const Trial& trial, Meeting& meeting) {
  Random random(trial.number);
  Options options;
  options.arena_bytes = 64 << 20;
  options.timeout = std::chrono::milliseconds(500);
  LocalBootstrap job(rank, kRanks, options);
  const std::string own = job.address();
  std::memcpy(meeting.addresses[rank], own.data(), meeting.sizes[rank] = own.size());
  ++meeting.come;
  while (meeting.come < kRanks) std::this_thread::yield();
  std::vector<std::string> addresses;
  for (int each = 0; each < kRanks; ++each) addresses.emplace_back(meeting.addresses[each], meeting.sizes[each]);
  uint64_t block;
  std::memcpy(&block, own.data() + 16, sizeof(block));  // LocalBootstrap::Address
  auto communicator = job.connect(addresses, Deadline::after(seconds(60)));
  try {
    auto slots = communicator->reserve_slots(4, {}, {});
    for (uint64_t step = 1; step <= 8; ++step) {
      const bool now = step == 3 || (trial.again && step > 3);
      if (rank == kRanks - 1 && now) {
        scribble(trial, random, block);
        if (trial.dies) _exit(0);
      }
      work(*communicator, slots, trial, step);
    }
  } catch (const Error&) {  // which one is as may be
  }
  try {
    if (trial.number % 4 == 0) communicator->shrink(std::chrono::milliseconds(200), {}, 0);
  } catch (const Error&) {
  }
  communicator->close();
  return true;
}

size_t scribbles() {
  const char* wanted = std::getenv("SYNCENGINE_TEST_SCRIBBLES");
  return wanted ? std::strtoul(wanted, nullptr, 10) : 1000;
}

}  // namespace

TEST(nobody_crashes_by_what_a_rank_scribbles) {
  constexpr size_t kAtATime = 8;
  struct Running {
    Trial trial;
    Meeting* meeting;
    std::vector<pid_t> ranks;
  };
  const auto words = all_words();
  std::deque<Running> running;
  std::string failed;
  auto end_one = [&] {
    const Running& first = running.front();
    for (size_t rank = 0; rank < kRanks; ++rank)
      if (!was_true(first.ranks[rank]))
        failed += std::string(" rank ") + std::to_string(rank) + " of trial " + std::to_string(first.trial.number) +
                  " (" + first.trial.words.name + ")";
    munmap(first.meeting, sizeof(Meeting));
    running.pop_front();
  };
  size_t written = 0;
  for (auto number = static_cast<unsigned>(scribbles()); written < scribbles(); ++number) {
    Random random(number);
    const int count = 1 + static_cast<int>(random() % 20);
    const Trial trial{number,           words[number % words.size()], count, random() % 2 == 0, random() % 4 == 0,
                      random() % 2 == 0};
    written += count;
    void* memory = mmap(nullptr, sizeof(Meeting), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    CHECK(memory != MAP_FAILED);
    auto* meeting = new (memory) Meeting{};
    running.push_back({trial, meeting, {}});
    for (int rank = 0; rank < kRanks; ++rank)
      running.back().ranks.push_back(start_child([&] { return run_rank(rank, trial, *meeting); }));
    if (running.size() >= kAtATime) end_one();
  }
  while (!running.empty()) end_one();
  if (!failed.empty()) testing::fail(__FILE__, __LINE__, failed);
}

}  // namespace syncengine
