// The proxy with the test's own thread in a stream's place: posts in order, words, results, and what becomes of
// failures.
#include "cuda/proxy.h"

#include "cuda/control.h"
#include "hosts_job.h"
#include "job.h"

namespace syncengine {

namespace {

using cuda::Proxy;

std::shared_ptr<Communicator> split_all(Communicator& communicator) {
  std::vector<int> ranks(communicator.size());
  std::iota(ranks.begin(), ranks.end(), 0);
  return communicator.split(ranks);
}

struct Slot {
  explicit Slot(size_t count, float value) : data(count, value) {}
  std::vector<float> data;
  uint32_t word = 0;

  std::shared_ptr<const Proxy::Posted> all_reduce() {
    return std::make_shared<Proxy::Posted>(testing::all_reduce_of(data), &word, nullptr);
  }
  // As a stream does.
  void wait() {
    while (!cuda::load(word)) std::this_thread::sleep_for(std::chrono::microseconds(50));
    cuda::store(word, 0);
  }
  bool is_ones() const {
    return std::ranges::all_of(data, [](float value) { return std::bit_cast<uint32_t>(value) == 0xffffffff; });
  }
};

Options within(double limit) { return {.timeout = seconds(limit)}; }

}  // namespace

TEST(proxy_ends_what_is_posted_in_its_order) {
  testing::run_hosts("aab", within(60), [](int rank, Communicator& communicator) {
    Proxy proxy(communicator.shared_from_this(), split_all(communicator));
    for (int round = 0; round < 20; ++round) {
      std::vector<Slot> slots;
      for (size_t i = 0; i < 8; ++i) slots.emplace_back(1 + i * 10'000, static_cast<float>(rank + i));
      for (auto& slot : slots) proxy.post(slot.all_reduce());
      for (size_t i = 0; i < slots.size(); ++i) {
        slots[i].wait();
        for (float value : slots[i].data) CHECK_EQ(value, static_cast<float>(3 + 3 * i));
      }
    }
    // The program's own calls have an order of their own.
    if (rank == 0) std::this_thread::sleep_for(std::chrono::milliseconds(20));
    Slot slot(100, 1), other(100, 2);
    if (rank == 1) proxy.post(slot.all_reduce());
    communicator.run(testing::all_reduce_of(other.data));
    if (rank != 1) proxy.post(slot.all_reduce());
    slot.wait();
    CHECK_EQ(slot.data[99], 3.f);
    CHECK_EQ(other.data[99], 6.f);
  });
}

TEST(proxy_gives_no_results_after_a_failure) {
  testing::run_hosts("ab", within(60), [](int rank, Communicator& communicator) {
    Proxy proxy(communicator.shared_from_this(), split_all(communicator));
    Slot first(1000, 1), second(rank == 0 ? 1000 : 999, 1), third(1000, 1);
    proxy.post(first.all_reduce());
    first.wait();
    CHECK_EQ(first.data[0], 2.f);
    communicator.run(
        {.collective = Collective::Barrier});  // else one rank's failure may come before the other's result
    for (Slot* slot : {&second, &third}) proxy.post(slot->all_reduce());
    for (Slot* slot : {&second, &third}) slot->wait();
    CHECK(second.is_ones() && third.is_ones());
    CHECK_THROWS(communicator.throw_if_failed(), ErrorKind::Mismatch);
    Slot later(10, 1);
    proxy.post(later.all_reduce());
    later.wait();
    CHECK(later.is_ones());
  });
}

TEST(proxy_fails_with_its_parent) {
  std::atomic<bool> over = false;
  testing::run_hosts("ab", within(60), [&](int rank, Communicator& communicator) {
    auto group = split_all(communicator);  // which takes nobody with it
    Proxy proxy(group, split_all(*group));
    if (rank == 0) {
      Slot slot(1000, 1);
      proxy.post(slot.all_reduce());
      std::this_thread::sleep_for(std::chrono::milliseconds(20));
      group->abort(ErrorKind::Aborted, "enough");
      slot.wait();
      over = true;
      CHECK(slot.is_ones());
    }
    // Rank 1 does not leave before: that would end the wait as well.
    for (const Deadline deadline = Deadline::after(seconds(20)); !over && !deadline.passed();)
      std::this_thread::sleep_for(std::chrono::milliseconds(5));
    CHECK(over);
    CHECK(testing::contains(CHECK_THROWS(group->check_peers(), ErrorKind::Aborted), "enough"));
  });
}

TEST(proxy_names_who_is_late) {
  std::atomic<bool> told = false;
  testing::run_hosts("ab", within(3), [&](int rank, Communicator& communicator) {
    auto group = split_all(communicator);
    Proxy proxy(group, split_all(*group));
    Slot slot(1000, 1);
    if (rank == 0) {
      const std::shared_ptr<void> end(nullptr, [&](void*) { told = true; });
      proxy.post(slot.all_reduce());
      slot.wait();
      CHECK(slot.is_ones());
      CHECK(testing::contains(CHECK_THROWS(group->throw_if_failed(), ErrorKind::Timeout), "rank 1"));
    }
    for (const Deadline deadline = Deadline::after(seconds(60)); !told && !deadline.passed();)
      std::this_thread::sleep_for(std::chrono::milliseconds(5));
  });
}

TEST(proxy_that_has_stopped_ends_late_posts) {
  testing::run_hosts("ab", within(60), [](int, Communicator& communicator) {
    Proxy proxy(communicator.shared_from_this(), split_all(communicator));
    Slot before(1000, 1), after(1000, 1);
    proxy.post(before.all_reduce());
    proxy.stop();
    CHECK(before.word == cuda::kArrived);
    CHECK_EQ(before.data[7], 2.f);
    proxy.post(after.all_reduce());
    CHECK(after.word == cuda::kArrived);
    CHECK(after.is_ones());
  });
}

}  // namespace syncengine
