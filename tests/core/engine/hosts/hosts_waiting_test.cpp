// Waits for other hosts: who moves the bytes meanwhile, and who sleeps.
#include <atomic>
#include <chrono>
#include <functional>
#include <thread>

#include "hosts_job.h"
#include "job.h"

namespace syncengine {

using testing::all_reduce_of, testing::check_values, testing::fill, testing::HostsJob, testing::run_hosts;
using testing::sum_of_values;

namespace {

// Runs a job of two hosts until both ranks say that threads did no more than they have to. On a busy machine one may be
// kept from running where another one then does its part, but not in each of so many rounds. `bound`: see
// FakeNetwork::bind().
void expect_in_some_round(bool bound, const std::function<bool(HostsJob&, int, Communicator&)>& body) {
  std::atomic<int> satisfied{0};
  for (int round = 0; round < 20 && satisfied < 2; ++round) {
    HostsJob job("ab");
    if (bound) job.network().bind();
    satisfied = 0;
    job.run([&](int rank, Communicator& communicator) { satisfied += body(job, rank, communicator); });
  }
  CHECK_EQ(satisfied.load(), 2);
}

}  // namespace

// What comes meanwhile is the business of the thread that moves bytes. Every 50 ms a wait looks around.
TEST(a_wait_for_other_hosts_sleeps_until_its_end) {
  expect_in_some_round(true, [](HostsJob&, int rank, Communicator& communicator) {
    constexpr size_t kNotes = 40;
    std::vector<float> notes(kNotes), data(1000);
    auto note = [&](size_t i) {
      return Message{.peer = 1 - rank, .tag = 1, .memory = SpanList(&notes[i], sizeof(float)), .describe = [] {
                       return std::string("a note");
                     }};
    };
    fill(data, rank);
    std::vector<std::shared_ptr<Work>> works;
    for (size_t i = 0; rank == 1 && i < kNotes; ++i) {
      works.push_back(communicator.send(note(i)));
      std::this_thread::sleep_for(std::chrono::milliseconds(2));
    }
    uint64_t before = communicator.counters().at("sleeps");
    auto begin = Clock::now();
    communicator.run(all_reduce_of(data));
    auto looks = static_cast<uint64_t>((Clock::now() - begin) / std::chrono::milliseconds(50));
    const uint64_t sleeps = communicator.counters().at("sleeps") - before;
    check_values(data, [](size_t i) { return sum_of_values(2, i); });
    for (size_t i = 0; rank == 0 && i < kNotes; ++i) works.push_back(communicator.receive(note(i)));
    for (const auto& work : works) communicator.wait(work);
    return rank == 1 || sleeps <= kNotes / 4 + looks;
  });
}

// Where it can, it moves them itself, and the other thread does not wake up for it.
TEST(a_wait_for_other_hosts_moves_the_bytes_itself) {
  expect_in_some_round(false, [](HostsJob& job, int rank, Communicator& communicator) {
    std::vector<float> data(300000);
    auto call = [&] { communicator.run(all_reduce_of(data)); };
    call();
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
    size_t before = job.network().steps_of_others(rank);
    constexpr int kCalls = 50;
    auto begin = Clock::now();
    for (int i = 0; i < kCalls; ++i) call();
    auto tens = static_cast<size_t>((Clock::now() - begin) / std::chrono::milliseconds(10));
    return job.network().steps_of_others(rank) - before <= kCalls / 2 + 2 * tens;  // it is there if this one is late
  });
}

// Whoever leaves works behind, or is late, is needed no more: the other thread goes on.
TEST(what_nobody_waits_for_moves_on_over_hosts) {
  run_hosts("ab", {}, [](int rank, Communicator& communicator) {
    std::vector<float> first(1000), second(300000);
    for (int round = 0; round < 20; ++round) {
      fill(first, rank), fill(second, rank);
      auto small = communicator.submit(all_reduce_of(first));
      auto large = communicator.submit(all_reduce_of(second));
      communicator.wait(small);
      Deadline deadline = Deadline::after(seconds(60));
      while (!large->ended() && !deadline.passed()) std::this_thread::sleep_for(std::chrono::milliseconds(1));
      CHECK(large->ended());
      check_values(second, [](size_t i) { return sum_of_values(2, i); });
    }
  });
}

}  // namespace syncengine
