// Slots of announced operations: agreed on among ranks that hold different ones, given back, and never shared.
#include "engine/lanes/slots.h"

#include <map>
#include <random>

#include "base/error.h"
#include "hosts_job.h"
#include "job.h"
#include "test.h"
#include "transport/shm/layout.h"

namespace syncengine {

namespace {

using testing::all_reduce_of, testing::run_job;

void check_sum(Communicator& communicator, const std::shared_ptr<const Slots>& slots, size_t index, uint64_t step = 1) {
  auto data = static_cast<float>(communicator.rank() + 1);
  communicator.wait(communicator.announce(slots, index, step, all_reduce_of(&data, sizeof(data))));
  CHECK_EQ(data, static_cast<float>(communicator.size() * (communicator.size() + 1)) / 2);
}

// Beside a table that marks each slot.
TEST(gaps_are_the_first_that_are_free) {
  std::mt19937 random(3);
  for (int round = 0; round < 50; ++round) {
    constexpr uint64_t kSize = 40;
    auto table = std::make_shared<SlotTable>(kSize);
    std::vector<bool> held(kSize);
    std::map<uint64_t, std::pair<size_t, std::shared_ptr<const Slots>>> taken;
    for (int step = 0; step < 100; ++step) {
      size_t count = 1 + random() % 6;
      uint64_t from = random() % (kSize + 1), expected = kSize;
      for (uint64_t first = from; first + count <= kSize && expected == kSize; ++first) {
        bool free = true;
        for (size_t i = 0; i < count; ++i) free &= !held[first + i];
        if (free) expected = first;
      }
      CHECK_EQ(table->gap(from, count), expected);
      if (expected < kSize) {
        CHECK(!table->take(expected + count, kSize));
        taken[expected] = {count, table->take(expected, count)};
        CHECK_EQ(taken[expected].second->first(), expected);
        CHECK(!table->take(expected, 1));
        for (size_t i = 0; i < count; ++i) held[expected + i] = true;
      }
      if (!taken.empty() && random() % 2) {
        auto victim = std::next(taken.begin(), static_cast<long>(random() % taken.size()));
        for (size_t i = 0; i < victim->second.first; ++i) held[victim->first + i] = false;
        taken.erase(victim);
      }
    }
  }
}

// Each rank drops what it holds in another order; what is agreed on is free on all ranks, and the same.
TEST(ranks_that_hold_different_slots_agree) {
  constexpr int kSize = 3, kRounds = 60;
  run_job(kSize, {}, [](int rank, Communicator& communicator) {
    std::mt19937 same(5), different(rank);
    std::vector<std::shared_ptr<const Slots>> kept;
    for (int round = 0; round < kRounds; ++round) {
      size_t count = 1 + same() % 20;
      auto slots = communicator.reserve_slots(count);
      auto extremes =
          std::array<int64_t, 2>{static_cast<int64_t>(slots->first()), -static_cast<int64_t>(slots->first())};
      communicator.run(all_reduce_of(extremes.data(), sizeof(extremes), DType::Int64, ReduceOp::Max), {});
      CHECK_EQ(extremes[0], -extremes[1]);
      check_sum(communicator, slots, 0);
      check_sum(communicator, slots, count - 1, 2 + round % 5);
      kept.push_back(slots);
      while (different() % 3) {
        if (kept.empty()) break;
        kept.erase(kept.begin() + static_cast<long>(different() % kept.size()));
      }
    }
  });
}

TEST(slots_come_back_when_all_ranks_have_dropped_them) {
  testing::run_on_each({"aa", "ab", "aab"}, {}, [](int rank, Communicator& communicator) {
    constexpr size_t kMany = shm::kReadySlots / 4 + 1;
    std::vector<std::shared_ptr<const Slots>> held;
    for (int i = 0; i < 3; ++i) held.push_back(communicator.reserve_slots(kMany));
    CHECK_THROWS(communicator.reserve_slots(kMany), ErrorKind::InvalidUsage);
    if (rank == 0) held[1].reset();
    CHECK_THROWS(communicator.reserve_slots(kMany), ErrorKind::InvalidUsage);  // the others still hold them
    check_sum(communicator, held[2], 7);                                       // and nothing has failed
    for (int round = 0; round < 8; ++round) {
      held[1].reset();
      held[1] = communicator.reserve_slots(kMany);
      CHECK_EQ(held[1]->first(), kMany + Slots::kBehind);
      check_sum(communicator, held[1], round % 3);
    }
  });
}

// Who has dropped its part of a model while it still waits for the others' announcements.
TEST(an_announcement_holds_its_slots_until_it_has_ended) {
  run_job(2, {}, [](int rank, Communicator& communicator) {
    auto slots = communicator.reserve_slots(3);
    float early = 1.0f;
    std::shared_ptr<Work> work;
    if (rank == 0) work = communicator.announce(slots, 1, 1, all_reduce_of(&early, sizeof(early)));
    auto second = slots;
    if (rank == 0) second.reset(), slots.reset();
    auto others = communicator.reserve_slots(3);
    CHECK_EQ(others->first(), 3 + Slots::kBehind);
    check_sum(communicator, others, 1);
    if (rank == 1) {
      work = communicator.announce(slots, 1, 1, all_reduce_of(&early, sizeof(early)));
      second.reset(), slots.reset();
    }
    communicator.wait(work);
    CHECK_EQ(early, 2.0f);
    CHECK_EQ(communicator.reserve_slots(3)->first(), uint64_t{0});
  });
}

TEST(announcements_of_a_slot_match_in_their_order) {
  run_job(2, {}, [](int rank, Communicator& communicator) {
    auto slots = communicator.reserve_slots(2);
    float data[] = {1.0f, 2.0f, 3.0f};
    std::vector<std::shared_ptr<Work>> works;
    auto announce = [&](int index, float& value, uint64_t step = 1) {
      works.push_back(communicator.announce(slots, index, step, all_reduce_of(&value, sizeof(value))));
    };
    if (rank == 0) announce(0, data[0]), announce(0, data[1], 2), announce(1, data[2]);
    communicator.run(all_reduce_of(&rank, sizeof(rank), DType::Int32));
    if (works.empty()) announce(1, data[2]), announce(0, data[0]), announce(0, data[1], 2);
    for (const auto& work : works) communicator.wait(work);
    for (int i = 0; i < 3; ++i) CHECK_EQ(data[i], 2.0f * static_cast<float>(i + 1));
  });
}

TEST(ranks_that_reserve_for_different_models_are_named) {
  run_job(2, {}, [](int rank, Communicator& communicator) {
    std::string model = rank == 0 ? "A" : "B";
    CHECK_THROWS(communicator.reserve_slots(3, [&] { return "buckets of " + model; }), ErrorKind::Mismatch);
  });
}

}  // namespace

}  // namespace syncengine
