// What a communicator's end does to others that work on the same memory.
#include <algorithm>
#include <atomic>
#include <barrier>
#include <thread>

#include "job.h"

namespace syncengine {

using testing::all_reduce_of;
using testing::run_job;

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

// The rest of the tensor belongs to whoever has it, also while its pages are cut loose.
TEST(what_is_written_beside_memory_that_is_severed_stays) {
  constexpr size_t kPart = 64 << 20, kBegin = kPart / sizeof(unsigned), kEnd = 2 * kBegin;
  auto arena = shm::Arena::create(4 * kPart);
  auto tensor = arena->allocate_tensor(2 * kPart);
  auto* data = static_cast<volatile unsigned*>(tensor.get());
  std::memset(tensor.get(), 0, kPart);
  std::atomic<bool> over{false};
  std::thread severing([&] {
    arena->sever_tensor(static_cast<size_t>(arena->offset_of(tensor.get(), 1)), kPart);
    over = true;
  });
  unsigned rounds = 0;
  bool kept = true;
  while (!over) {
    for (size_t i = kBegin; i < kEnd; i += shm::kPage) {
      kept &= data[i] == rounds;
      data[i] = rounds + 1;
    }
    ++rounds;
  }
  severing.join();
  for (size_t i = kBegin; i < kEnd; i += shm::kPage) kept &= data[i] == rounds;
  CHECK(kept && rounds > 0);
}

}  // namespace syncengine
