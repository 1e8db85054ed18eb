// Waits for other hosts: who moves the bytes meanwhile, and who sleeps.
#include <chrono>
#include <thread>

#include "hosts_job.h"
#include "job.h"

namespace syncengine {

using testing::all_reduce_of, testing::check_values, testing::fill, testing::HostsJob, testing::run_hosts;
using testing::sum_of_values;

// What comes meanwhile is the business of the thread that moves bytes. Every 50 ms a wait looks around.
TEST(a_wait_for_other_hosts_sleeps_until_its_end) {
  HostsJob job("ab");
  job.network().bind();
  job.run([](int rank, Communicator& communicator) {
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
    CHECK(rank == 1 || communicator.counters().at("sleeps") - before <= kNotes / 4 + looks);
    check_values(data, [](size_t i) { return sum_of_values(2, i); });
    for (size_t i = 0; rank == 0 && i < kNotes; ++i) works.push_back(communicator.receive(note(i)));
    for (const auto& work : works) communicator.wait(work);
  });
}

// Where it can, it moves them itself, and the other thread does not wake up for it.
TEST(a_wait_for_other_hosts_moves_the_bytes_itself) {
  HostsJob job("ab");
  job.run([&](int rank, Communicator& communicator) {
    std::vector<float> data(300000);
    auto call = [&] { communicator.run(all_reduce_of(data)); };
    call();
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
    size_t before = job.network().steps_of_others(rank);
    constexpr int kCalls = 50;
    auto begin = Clock::now();
    for (int i = 0; i < kCalls; ++i) call();
    auto tens = static_cast<size_t>((Clock::now() - begin) / std::chrono::milliseconds(10));
    CHECK(job.network().steps_of_others(rank) - before <= kCalls / 2 + 2 * tens);  // it is there if this one is late
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
      Deadline deadline = Deadline::after(seconds(10));
      while (!large->ended() && !deadline.passed()) std::this_thread::sleep_for(std::chrono::milliseconds(1));
      CHECK(large->ended());
      check_values(second, [](size_t i) { return sum_of_values(2, i); });
    }
  });
}

}  // namespace syncengine
