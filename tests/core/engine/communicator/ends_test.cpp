// What the end of a communicator, or of shrink(), does to others: to their memory, and to those that go on.
#include <algorithm>
#include <atomic>
#include <barrier>
#include <stdexcept>
#include <string>
#include <thread>

#include "engine/communicator/engine_communicator.h"
#include "engine/communicator/membership.h"
#include "hosts_job.h"
#include "job.h"

namespace syncengine {

using testing::all_reduce_of, testing::run_job;

namespace {

constexpr size_t kCount = 1 << 18, kBytes = kCount * sizeof(float);

Operation broadcast_of(float* data) {
  Operation operation = all_reduce_of(data, kBytes);
  operation.collective = Collective::Broadcast;
  operation.root = 0;
  return operation;
}

Message message(float* data) {
  return {.peer = 1, .memory = {data, kBytes}, .source = std::make_shared<std::atomic<int>>(-1), .describe = [] {
            return std::string("send()");
          }};
}

bool all_are(const float* data, float value) {
  return std::all_of(data, data + kCount, [&](float element) { return element == value; });
}

// What only the communicator itself knows: see [temp.explicit], which names private members.
Engine& engine_of(EngineCommunicator& communicator);
template <const std::shared_ptr<Engine> EngineCommunicator::* part>
struct EngineOf {
  friend Engine& engine_of(EngineCommunicator& communicator) { return *(communicator.*part); }
};
template struct EngineOf<&EngineCommunicator::engine_>;

// Rank 0 begins something on both communicators, of which `failing` fails, and rank 1 then takes part in what is left.
struct Job {
  std::barrier<> failed{2};
  using Begin = std::function<std::shared_ptr<Work>(Communicator& failing, float* data)>;

  void run(const std::function<Operation(float*)>& healthy, const Begin& begin, float expected) {
    run_job(2, {}, [&](int rank, Communicator& communicator) {
      auto failing = communicator.split({0, 1});
      auto memory = communicator.allocate(2 * kBytes);
      auto* data = static_cast<float*>(memory.get());
      std::fill_n(data, 2 * kCount, static_cast<float>(rank + 1));
      std::shared_ptr<Work> work, lost;
      if (rank == 0) {
        work = communicator.submit(healthy(data));
        lost = begin(*failing, data);
        failing->abort(ErrorKind::Aborted, "enough");
        CHECK_THROWS(failing->wait(lost), ErrorKind::Aborted);
      }
      failed.arrive_and_wait();
      if (rank == 1) work = communicator.submit(healthy(data));
      communicator.wait(work);
      CHECK(all_are(data, expected));
      const auto before = communicator.counters().at("direct_bytes");
      communicator.run(all_reduce_of(data, kBytes));
      CHECK_EQ(communicator.counters().at("direct_bytes"), before + kBytes);  // peers reach it as before
      CHECK(all_are(data, 2 * expected));
    });
  }
};

}  // namespace

TEST(a_failure_costs_no_more_of_a_tensor_than_its_operations_used) {
  Job().run([](float* data) { return all_reduce_of(data, kBytes); },
            [](Communicator& failing, float* data) { return failing.submit(all_reduce_of(data + kCount, kBytes)); },
            3.0f);
}

TEST(a_failure_costs_nothing_of_what_peers_only_read) {
  Job().run(broadcast_of, [](Communicator& failing, float* data) { return failing.submit(broadcast_of(data)); }, 1.0f);
  Job().run(broadcast_of, [](Communicator& failing, float* data) { return failing.send(message(data)); }, 1.0f);
}

// Rank 1 may still send to rank 2 what it reads of rank 0's tensor, since a failure takes longer to the other host.
TEST(what_a_member_may_still_send_to_another_host_is_not_lost_with_its_tensor) {
  std::barrier met(3);
  testing::run_hosts("aab", {}, [&](int rank, Communicator& communicator) {
    Engine& engine = engine_of(dynamic_cast<EngineCommunicator&>(communicator));
    shm::Arena& arena = *engine.arena();
    const shm::PeerArena peer(arena.fd(), arena.bytes());
    auto failing = communicator.split({0, 1, 2});
    auto memory = communicator.allocate(kBytes);
    auto* data = static_cast<float*>(memory.get());
    std::fill_n(data, kCount, 1.0f);
    const auto offset = static_cast<uint64_t>(arena.offset_of(data, kBytes));
    const auto* theirs = reinterpret_cast<const float*>(peer.at(offset, kBytes));
    bool kept = true;
    if (rank == 0) {
      auto work = failing->submit(all_reduce_of(data, kBytes));
      engine.progress();  // opens the operation
      failing->abort(ErrorKind::Aborted, "enough");
      memory.reset();
      kept = work->ended() && all_are(theirs, 1.0f);
    }
    met.arrive_and_wait();
    failing.reset();
    met.arrive_and_wait();
    communicator.allocate(1);  // gives back the blocks that nobody uses
    CHECK(kept && all_are(theirs, rank == 0 ? 0.0f : 1.0f));
  });
}

// The rest of the tensor belongs to whoever has it, also while its pages are cut loose. The first and the last of these
// pages are severed in part: the program writes to the first element, and to all that is behind the severed range.
TEST(what_is_written_beside_memory_that_is_severed_stays) {
  constexpr size_t kPart = 64 << 20, kBegin = kPart / sizeof(unsigned), kEnd = 2 * kBegin;
  std::vector<size_t> beside{0};
  for (size_t i = kBegin + 1; i < kEnd; i += shm::kPage) beside.push_back(i);
  auto arena = shm::Arena::create(4 * kPart);
  auto tensor = arena->allocate_tensor(2 * kPart);
  auto* data = static_cast<volatile unsigned*>(tensor.get());
  std::memset(tensor.get(), 0, kPart);
  std::atomic<bool> over{false};
  std::thread severing([&] {
    arena->sever_tensor(static_cast<size_t>(arena->offset_of(tensor.get(), 1)) + sizeof(unsigned), kPart);
    over = true;
  });
  unsigned rounds = 0;
  bool kept = true;
  while (!over) {
    for (size_t i : beside) {
      kept &= data[i] == rounds;
      data[i] = rounds + 1;
    }
    ++rounds;
  }
  severing.join();
  for (size_t i : beside) kept &= data[i] == rounds;
  CHECK(kept && rounds > 0);
}

// Rank 1 goes on with rank 0, which had arrived before its shrink() was interrupted, and which lives.
TEST(whoever_is_interrupted_in_shrink_tells_those_that_go_on_with_it) {
  struct Pressed : std::runtime_error, Interruption {
    Pressed() : std::runtime_error("Ctrl-C"), Interruption("") {}
  };
  std::barrier meet(2);
  run_job(2, {.timeout = seconds(60)}, [&](int rank, Communicator& communicator) {
    std::string said;
    if (rank == 1) meet.arrive_and_wait();
    try {
      const auto next = communicator.shrink(seconds(200), [&] {
        if (rank == 0) throw Pressed();
      });
      next->run({.collective = Collective::Barrier});
    } catch (const std::exception& error) {
      said = error.what();
    }
    if (rank == 0) meet.arrive_and_wait();
    meet.arrive_and_wait();  // before rank 0 leaves
    CHECK_EQ(said, rank == 0 ? "Ctrl-C" : "rank 0 was interrupted (Ctrl-C) in shrink()");
  });
}

// The barrier of init() may fail twice: by its communicator, and by the rank that then gives up. Peers may be reading.
TEST(the_first_end_record_of_a_rank_stays) {
  shm::EndRecord record{};
  write_end_record(record, shm::Standing::Failed, ErrorKind::PeerLost, "rank 1 has died");
  write_end_record(record, shm::Standing::Left, ErrorKind::Aborted, "again");
  CHECK_EQ(std::string(record.text), "rank 1 has died");
  CHECK(record.kind == static_cast<uint32_t>(ErrorKind::PeerLost));
  CHECK(record.standing == static_cast<uint32_t>(shm::Standing::Failed));
}

}  // namespace syncengine
