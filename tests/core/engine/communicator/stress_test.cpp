// Many threads, communicators and operations at once, with delays where they hurt: nothing hangs, nothing is mixed up.
#include <random>

#include "hosts_job.h"

namespace syncengine {

using testing::all_reduce_of, testing::run_job;

namespace {

void pause(int milliseconds) { std::this_thread::sleep_for(std::chrono::milliseconds(milliseconds)); }

void check_all(const std::vector<float>& data, float expected) {
  for (float value : data) CHECK_EQ(value, expected);
}

}  // namespace

// Rank 1 stalls at the end of the first operation, with many opened behind it. Rank 0 needs nothing from it for as long
// as operations are direct and their data are there: it must not overwrite the records that rank 1 has yet to compare.
TEST(records_outlast_a_rank_that_stalls) {
  constexpr size_t kOperations = 4 * shm::kRecords;
  std::barrier rank_1_has_submitted(2);
  run_job(2, {.algorithm = Algorithm::Direct}, [&](int rank, Communicator& communicator) {
    if (rank == 0) rank_1_has_submitted.arrive_and_wait();
    std::vector<float> large(5 * shm::kSlotBytes / 4, 1.0f);
    auto shared = communicator.allocate(kOperations * 400);
    auto* floats = static_cast<float*>(shared.get());
    std::fill_n(floats, kOperations * 100, 1.0f);
    Operation first = all_reduce_of(large);
    if (rank == 1) first.keepalive = {nullptr, [](void*) { pause(200); }};  // takes its time to go
    std::vector<std::shared_ptr<Work>> works{communicator.submit(std::move(first))};
    for (size_t i = 0; i < kOperations; ++i)  // another length each, so that records can't be taken for each other
      works.push_back(communicator.submit(all_reduce_of(floats + i * 100, (1 + i % 97) * 4)));
    if (rank == 1) rank_1_has_submitted.arrive_and_wait();
    for (auto& work : works) communicator.wait(work);
    check_all(large, 2);
    for (size_t i = 0; i < kOperations; ++i) CHECK_EQ(floats[i * 100 + i % 97], 2.0f);
  });
}

// Two threads of a rank work on a communicator each, a third one lets the engine's thread do it: all drive the same
// engine.
TEST(many_threads_and_communicators) {
  constexpr int kSize = 3, kThreads = 4, kRounds = 60 / testing::kSlowdown;
  run_job(kSize, {}, [](int rank, Communicator& communicator) {
    std::vector<std::shared_ptr<Communicator>> own;
    for (int thread = 0; thread < kThreads; ++thread) own.push_back(communicator.split({0, 1, 2}));
    testing::run_ranks(kThreads, [&](int thread) {
      Communicator& mine = *own[thread];
      std::mt19937 same(thread);                      // the same calls on every rank
      std::mt19937 different(thread * kSize + rank);  // at another pace
      for (int round = 0; round < kRounds; ++round) {
        std::vector<std::vector<float>> data(1 + same() % 5);
        std::vector<std::shared_ptr<Work>> works;
        for (size_t i = 0; i < data.size(); ++i) {
          data[i].assign(same() % 4 ? 1 + same() % 300 : 1 + same() % 150000, static_cast<float>(rank + round));
          if (same() % 3 == 0)
            mine.run(all_reduce_of(data[i]));
          else
            works.push_back(mine.submit(all_reduce_of(data[i])));
          if (different() % 8 == 0) pause(1);
        }
        if (same() % 2) std::reverse(works.begin(), works.end());
        for (auto& work : works) mine.wait(work);
        for (auto& array : data) check_all(array, 3.0f * static_cast<float>(round) + 3);
      }
    });
  });
}

// Several threads wait for works of one communicator, in any order.
TEST(several_threads_wait_on_one_communicator) {
  constexpr int kThreads = 4, kRounds = 80 / testing::kSlowdown;
  testing::run_on_each({"aa", "ab"}, {}, [](int rank, Communicator& communicator) {
    for (int round = 0; round < kRounds; ++round) {
      std::vector<std::vector<float>> data(kThreads * 4);
      std::vector<std::shared_ptr<Work>> works;
      for (size_t i = 0; i < data.size(); ++i) {
        data[i].assign(i % 5 ? 100 * i + 1 : 100000, static_cast<float>(rank + 1));
        works.push_back(communicator.submit(all_reduce_of(data[i])));
      }
      testing::run_ranks(kThreads, [&](int thread) {
        std::mt19937 random(thread * 1000 + round * 2 + rank);
        if (random() % 4 == 0) pause(1);
        for (size_t i : testing::shuffled(works.size(), random)) {
          communicator.wait(works[i]);
          CHECK_EQ(data[i].front(), 3.0f);
          CHECK_EQ(data[i].back(), 3.0f);
        }
      });
    }
  });
}

TEST(more_announcements_than_the_log_and_the_records_hold) {
  constexpr size_t kBuckets = shm::kLogEntries + 3 * shm::kRecords;
  run_job(3, {}, [](int rank, Communicator& communicator) {
    auto slots = communicator.reserve_slots(kBuckets);
    std::mt19937 random(rank);
    for (int round = 0; round < 2; ++round) {
      std::vector<float> data(kBuckets, static_cast<float>(rank + round));
      std::vector<std::shared_ptr<Work>> works(kBuckets);
      for (size_t bucket : testing::shuffled(kBuckets, random)) {
        data[bucket] *= static_cast<float>(bucket);
        works[bucket] = communicator.announce(slots, bucket, round + 1, all_reduce_of(&data[bucket], 4));
      }
      for (size_t bucket = 0; bucket < kBuckets; ++bucket) {
        communicator.wait(works[bucket]);
        CHECK_EQ(data[bucket], static_cast<float>((3 + 3 * round) * bucket));
      }
    }
  });
}

TEST(more_submissions_than_the_records_hold) {
  constexpr size_t kOperations = 10 * shm::kRecords;
  run_job(4, {}, [](int rank, Communicator& communicator) {
    std::vector<int64_t> data(kOperations);
    std::vector<std::shared_ptr<Work>> works;
    for (size_t i = 0; i < kOperations; ++i) {
      data[i] = static_cast<int64_t>(i) + rank;
      Operation operation = all_reduce_of(&data[i], 8, DType::Int64);
      if (i % 3 == 0) operation.collective = Collective::Broadcast;
      operation.root = i % 3 == 0 ? static_cast<int>(i / 3 % 4) : kNoRoot;
      works.push_back(communicator.submit(operation));
    }
    for (size_t i = kOperations; i-- > 0;) {
      communicator.wait(works[i]);
      CHECK_EQ(data[i], static_cast<int64_t>(i % 3 == 0 ? i + i / 3 % 4 : 4 * i + 6));
    }
  });
}

// Whoever aborts, wherever everybody is: each call ends with the aborting rank's words, on every thread and
// communicator rank.
TEST(an_abort_in_the_middle_reaches_everybody) {
  constexpr int kSize = 4;
  for (int round = 0; round < 12 / testing::kSlowdown; ++round) {
    const int aborter = round % kSize;
    const std::string text = "rank " + std::to_string(aborter) + ": RuntimeError: round " + std::to_string(round);
    run_job(kSize, {}, [&](int rank, Communicator& communicator) {
      std::shared_ptr<const Slots> slots;
      std::mt19937 random(round * kSize + rank);
      std::jthread trouble;
      if (rank == aborter)
        trouble = std::jthread([&, delay = random() % 20] {
          pause(static_cast<int>(delay));
          communicator.abort(ErrorKind::Aborted, text);
        });
      std::string seen;
      std::vector<std::vector<float>> buckets(8, std::vector<float>(70000, 1.0f));  // outlive the abort
      std::vector<float> own(1000, 1.0f);
      std::shared_ptr<void> shared;
      try {
        shared = communicator.allocate(4 << 20);
        slots = communicator.reserve_slots(8);
        for (uint64_t step = 1;; ++step) {
          std::vector<std::shared_ptr<Work>> works;
          std::shuffle(buckets.begin(), buckets.end(), random);
          for (size_t i = 0; i < buckets.size(); ++i)
            works.push_back(communicator.announce(slots, i, step, all_reduce_of(buckets[i])));
          communicator.run(all_reduce_of(own));
          communicator.run(all_reduce_of(shared.get(), 4 << 20));
          if (random() % 4 == 0) pause(1);
          for (auto& work : works) communicator.wait(work);
        }
      } catch (const Error& error) {
        CHECK(error.kind() == ErrorKind::Aborted);
        seen = error.what();
      }
      if (trouble.joinable()) trouble.join();
      CHECK_EQ(seen, text);
      CHECK_THROWS(communicator.run(all_reduce_of(own)), ErrorKind::Aborted);
      if (slots) CHECK_THROWS(communicator.announce(slots, 0, 1, all_reduce_of(own)), ErrorKind::Aborted);
    });
  }
}

TEST(dropped_work_is_done_all_the_same) {
  run_job(3, {}, [](int, Communicator& communicator) {
    auto data = std::make_shared<std::vector<float>>(100000, 1.0f);
    std::weak_ptr<std::vector<float>> alive = data;
    for (int i = 0; i < 5; ++i) {
      Operation operation = all_reduce_of(*data);
      operation.keepalive = data;
      communicator.submit(std::move(operation));  // nobody keeps the work
    }
    data.reset();
    for (int i = 0; i < 20000 && !alive.expired(); ++i) pause(1);
    CHECK(alive.expired());
    std::vector<float> next(10, 1.0f);
    communicator.run(all_reduce_of(next));
    check_all(next, 3);
    CHECK_EQ(communicator.counters().at("operations"), uint64_t{6});
  });
}

TEST(a_communicator_closed_with_work_pending) {
  std::barrier rank_0_has_left(3);
  run_job(3, {}, [&](int rank, Communicator& communicator) {
    auto group = communicator.split({0, 1, 2});
    std::vector<float> data(100000, 1.0f), next(10, 1.0f);
    if (rank == 0) {
      auto work = group->submit(all_reduce_of(data));
      group.reset();
      CHECK_THROWS(work->rethrow_if_failed(), ErrorKind::InvalidUsage);
    }
    rank_0_has_left.arrive_and_wait();
    if (rank != 0) CHECK_THROWS(group->run(all_reduce_of(data), {}), ErrorKind::PeerLost);
    communicator.run(all_reduce_of(next));  // the others go on
    check_all(next, 3);
  });
}

// Who has made its last call leaves at once, while slower ranks still look around for it.
TEST(leaving_after_the_last_call_harms_nobody) {
  for (int job = 0; job < 12 / testing::kSlowdown; ++job) {
    run_job(3, {.arena_bytes = 2000 << 20}, [&](int rank, Communicator& communicator) {
      for (int round = 0; round < 20; ++round) {
        auto group = communicator.split({0, 1, 2});
        std::vector<float> data(10, 1.0f);
        if (rank == round % 3)
          std::this_thread::sleep_for(std::chrono::microseconds(250));  // about as long as others spin
        group->run(all_reduce_of(data), {});
        check_all(data, 3);
      }
    });
  }
}

// The rank that comes first sleeps once, the last one never: each finds all it needs when it wakes. The best of some
// rounds, since a busy machine may stretch any of them beyond a tick.
TEST(a_small_exchange_costs_one_sleep) {
  run_job(2, {}, [](int rank, Communicator& communicator) {
    std::vector<float> data(8, 1.0f);
    for (int late : {0, 1}) {
      const uint64_t expected = rank == late ? 0 : 1;
      // At least once: on a busy machine the other rank may be the late one, or somebody sleeps twice.
      bool seen = false;
      for (int round = 0; round < 100; ++round) {
        const uint64_t before = communicator.counters().at("sleeps");
        if (rank == late) pause(3);
        communicator.run(all_reduce_of(data));
        seen |= communicator.counters().at("sleeps") - before == expected;
      }
      CHECK(seen);
    }
  });
}

}  // namespace syncengine
