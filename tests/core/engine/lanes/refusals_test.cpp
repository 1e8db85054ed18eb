// Steps that ranks refuse: they end on all ranks alike, and everything else goes on.
#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <numeric>
#include <random>
#include <thread>

#include "base/error.h"
#include "engine/communicator/communicator.h"
#include "hosts_job.h"
#include "job.h"
#include "test.h"

namespace syncengine {

namespace {

using testing::all_reduce_of, testing::run_hosts, testing::run_on_each;

constexpr size_t kBuckets = 4;
const std::vector<std::string> kPlacements{"aaa", "ab", "aab", "abc"};

std::string reason(int rank, uint64_t step) {
  return "rank " + std::to_string(rank) + " has a bad batch in step " + std::to_string(step) + std::string(40, '.');
}

// One rank's part of a step: the buckets in some order, then the vote, which is waited for first. `announced` of them
// before it refuses; all and the vote if it does not.
struct Step {
  Communicator& communicator;
  const std::shared_ptr<const Slots>& slots;
  uint64_t number;
  std::vector<float> data = std::vector<float>(kBuckets + 1);

  // The refusal's text; empty if there were results.
  std::string run(std::mt19937& random, bool refuses, size_t announced, uint8_t how) {
    std::iota(data.begin(), data.end(), static_cast<float>(communicator.rank()));
    std::vector<size_t> order = testing::shuffled(kBuckets, random);
    order.push_back(kBuckets);
    if (refuses) order.resize(announced);
    std::vector<std::shared_ptr<Work>> works(kBuckets + 1);
    for (size_t bucket : order)
      works[bucket] = communicator.announce(slots, bucket, number, all_reduce_of(&data[bucket], 4));
    std::string text = reason(communicator.rank(), number);
    if (refuses) {
      communicator.refuse(slots, number, text);
    } else {
      try {
        communicator.wait(works[kBuckets]);
        for (const auto& work : works) communicator.wait(work);
        return "";
      } catch (const StepRefused& error) {
        text = error.what();
      }
    }
    end(how);
    return text;
  }
  void end(uint8_t how) {
    ended = std::make_shared<uint8_t>(how);
    communicator.wait(communicator.end_refused(slots, number, ended));
  }
  std::shared_ptr<uint8_t> ended;
};

// One in which the rank announces all, and does not refuse.
std::string run_step(Communicator& communicator, const std::shared_ptr<const Slots>& slots, uint64_t number) {
  std::mt19937 random(communicator.rank() + number * 100);
  return Step{communicator, slots, number}.run(random, false, 0, 0);
}

// Every rank draws what all ranks do.
TEST(a_step_has_results_on_all_ranks_or_on_none) {
  run_on_each(kPlacements, {}, [](int rank, Communicator& communicator) {
    const int size = communicator.size();
    std::mt19937 same(7), different(rank);
    auto slots = communicator.reserve_slots(kBuckets + 1);
    for (uint64_t number = 1, round = 0; round < 150; ++round, ++number) {
      std::array<int, 3> announced{};  // -1: all
      std::array<uint8_t, 3> how{};
      bool refused = false;
      for (int other = 0; other < size; ++other) {
        announced[other] = same() % 3 == 0 ? static_cast<int>(same() % (kBuckets + 1)) : -1;
        how[other] = same() % 2;
        refused |= announced[other] >= 0;
      }
      Step step{communicator, slots, number};
      const std::string text = step.run(different, announced[rank] >= 0, announced[rank], how[rank]);
      CHECK_EQ(text.empty(), !refused);
      if (!refused) {
        for (size_t bucket = 0; bucket <= kBuckets; ++bucket)
          CHECK_EQ(step.data[bucket], static_cast<float>(size * (size - 1)) / 2 + static_cast<float>(size * bucket));
      } else {
        bool is_a_refusers = false;
        for (int other = 0; other < size; ++other)
          is_a_refusers |= announced[other] >= 0 && text == reason(other, number);
        CHECK(is_a_refusers);
        CHECK_EQ(int{*step.ended}, int{*std::max_element(how.begin(), how.begin() + size)});
      }
      if (round % 40 == 39) {  // another holder, whose steps begin anew
        slots.reset();
        slots = communicator.reserve_slots(kBuckets + 1);
        number = 0;
      }
      if (different() % 8 == 0) std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
  });
}

// They had the results, and lose them: in the end all alike, or the communicator.
TEST(results_that_are_refused_are_lost_by_all_ranks_or_end_the_communicator) {
  for (bool all : {true, false}) {
    run_on_each(kPlacements, {}, [&](int rank, Communicator& communicator) {
      auto slots = communicator.reserve_slots(kBuckets + 1);
      std::mt19937 random(rank);
      auto lose = [&] {
        Step step{communicator, slots, 1};
        CHECK_EQ(step.run(random, false, 0, 0), std::string());
        if (!all && rank != 1) return;
        communicator.refuse(slots, 1, reason(rank, 1));
        step.end(1);
      };
      auto go_on = [&] { CHECK_EQ(run_step(communicator, slots, 2), std::string()); };
      if (all) return lose(), go_on();
      const std::string text = CHECK_THROWS((lose(), go_on()), ErrorKind::Aborted);
      CHECK_EQ(text, reason(1, 1));
      CHECK_THROWS(communicator.throw_if_failed(), ErrorKind::Aborted);
    });
  }
}

TEST(a_rank_that_refuses_and_leaves_ends_the_others_with_its_reason) {
  run_on_each(kPlacements, {}, [](int rank, Communicator& communicator) {
    if (rank == 1) {
      auto slots = communicator.reserve_slots(kBuckets + 1);
      communicator.refuse(slots, 1, reason(1, 1));
      communicator.end_refused(slots, 1, std::make_shared<uint8_t>(0));
      return communicator.close();
    }
    bool has_ended = false;  // the step, here: rank 1 leaves in good order then
    try {
      auto slots = communicator.reserve_slots(kBuckets + 1);  // the others may still be in this
      CHECK_EQ(run_step(communicator, slots, 1), reason(1, 1));
      has_ended = true;
      run_step(communicator, slots, 2);
      CHECK(false);
    } catch (const Error& error) {
      CHECK(error.kind() == ErrorKind::Aborted || (has_ended && error.kind() == ErrorKind::PeerLost));
      if (error.kind() == ErrorKind::Aborted) CHECK_EQ(std::string(error.what()), reason(1, 1));
    }
  });
}

// Its part of a bucket that all have announced is on its way, in memory that peers write to.
TEST(a_rank_that_hears_of_a_refusal_and_leaves_ends_the_others_with_its_reason) {
  constexpr size_t kBytes = 32 << 20;
  std::atomic<int> ended = 0;
  for (int round = 0; round < 5; ++round) {
    run_hosts("aaa", {}, [&ended](int rank, Communicator& communicator) {
      auto memory = communicator.allocate(kBytes);
      try {
        auto slots = communicator.reserve_slots(kBuckets + 1);  // the others may still be in this
        auto large = communicator.announce(slots, 0, 1, all_reduce_of(memory.get(), kBytes));
        if (rank == 1) {
          communicator.refuse(slots, 1, reason(1, 1));
        } else {
          float last = 0;
          auto vote = communicator.announce(slots, kBuckets, 1, all_reduce_of(&last, sizeof(last)));
          CHECK_EQ(CHECK_THROWS(communicator.wait(vote), ErrorKind::Aborted), reason(1, 1));
        }
        communicator.end_refused(slots, 1, std::make_shared<uint8_t>(0));
        if (rank == 0) return communicator.close();
        communicator.wait(large);
      } catch (const Error& error) {
        CHECK_EQ(std::string(error.what()), reason(1, 1));
        ++ended;
      }
    });
  }
  CHECK(ended > 0);  // in some rounds the bucket may have been reduced before rank 0 left
}

TEST(a_refusal_concerns_one_holder_of_slots) {
  run_on_each(kPlacements, {}, [](int rank, Communicator& communicator) {
    auto refused = communicator.reserve_slots(kBuckets + 1), other = communicator.reserve_slots(kBuckets + 1);
    for (uint64_t number = 1; number < 5; ++number) {
      std::shared_ptr<Work> end;
      if (rank == 0) {
        communicator.refuse(refused, number, reason(0, number));
        end = communicator.end_refused(refused, number, std::make_shared<uint8_t>(0));
      }
      CHECK_EQ(run_step(communicator, other, number), std::string());
      if (rank == 0)
        communicator.wait(end);
      else
        CHECK_EQ(run_step(communicator, refused, number), reason(0, number));
    }
  });
}

}  // namespace

}  // namespace syncengine
