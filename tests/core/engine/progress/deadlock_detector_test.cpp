// Ranks that wait for each other: an error where nobody can end it, and never where somebody can.
#include "engine/progress/deadlock_detector.h"

#include <random>

#include "job.h"

namespace syncengine {

using testing::all_reduce_of, testing::contains, testing::run_job;

namespace {

// Boards without engines: each rank says what it waits for.
struct Table {
  explicit Table(int size) : boards(size) {
    std::vector<shm::WaitBoard*> all;
    for (auto& board : boards) all.push_back(&board);
    for (int rank = 0; rank < size; ++rank) ranks.emplace_back(all, rank);
  }
  // Each wait as the mask of the ranks that it needs.
  void wait(int rank, const std::vector<uint64_t>& masks, bool everybody = true) {
    std::vector<DeadlockDetector::Wait> waits;
    for (uint64_t mask : masks) waits.push_back({.group = 4096, .place = {0, waits.size(), 0}, .missing = mask});
    ranks[rank].publish(waits, everybody);
  }

  std::vector<shm::WaitBoard> boards;
  std::vector<DeadlockDetector> ranks;
};

// Each rank has one thread.
void run_counting_threads(int size, const std::function<void(int, Communicator&)>& body) {
  run_job(size, {}, body, [] { return 1; });
}

}  // namespace

TEST(a_deadlock_is_believed_once_every_rank_has_looked_again) {
  Table table(2);
  for (int look = 0; look < 3; ++look) {
    table.wait(0, {0b10});
    table.wait(1, {0b01});
    CHECK_EQ(table.ranks[0].search(), look < 2 ? 0u : 0b11u);
  }
  CHECK_EQ(table.ranks[0].chain(0b11).size(), 2u);
  CHECK_EQ(table.ranks[0].waits_for_me(0b11).size(), 1u);
  // One that has stopped may have missed a call that was made since.
  Table stopped(2);
  stopped.wait(1, {0b01});
  for (int look = 0; look < 10; ++look) {
    stopped.wait(0, {0b10});
    CHECK_EQ(stopped.ranks[0].search(), 0u);
  }
}

TEST(whoever_can_go_on_is_not_stuck) {
  struct Case {
    const char* what;
    std::vector<std::vector<uint64_t>> waits;  // by rank
    uint64_t stuck;
    uint64_t with_other_threads = 0;  // ranks
  };
  const Case cases[] = {
      {"two wait for each other", {{0b010}, {0b001}, {}}, 0b011},
      {"a ring of three", {{0b010}, {0b100}, {0b001}}, 0b111},
      {"one waits for a ring", {{0b010}, {0b001}, {0b001}}, 0b111},
      {"for two, of whom one is stuck", {{0b110}, {0b001}, {}}, 0b011},
      {"a chain has an end", {{0b010}, {0b100}, {}}, 0},
      {"another thread may bring it", {{0b010}, {0b001}, {}}, 0, 0b010},
      {"another thread behind a ring may bring it", {{0b010}, {0b100}, {0b001}}, 0, 0b100},
      {"one of two threads will be served", {{0b010, 0b100}, {0b001}, {}}, 0},
      {"two threads, both stuck", {{0b010, 0b100}, {0b001}, {0b001}}, 0b111},
      {"a wait that needs nobody ends", {{0b010}, {0b001, 0}, {}}, 0},
  };
  for (const Case& test : cases) {
    Table table(3);
    uint64_t found = 0;
    for (int look = 0; look < 4; ++look) {
      for (int rank = 0; rank < 3; ++rank) table.wait(rank, test.waits[rank], !(test.with_other_threads >> rank & 1));
      found = table.ranks[0].search();
    }
    if (found != test.stuck) testing::fail(__FILE__, __LINE__, test.what);
  }
}

TEST(a_change_starts_the_search_anew) {
  Table table(2);
  for (int look = 0; look < 10; ++look) {
    table.wait(0, {0b10});
    for (bool waits : {false, true}) table.wait(1, waits ? std::vector<uint64_t>{0b01} : std::vector<uint64_t>{});
    CHECK_EQ(table.ranks[0].search(), 0u);
  }
}

// Each waits in another pair. Who finds it fails its own pairs; its error, uncaught, ends the job and so reaches the
// third.
TEST(cycles_of_three_are_found) {
  run_counting_threads(3, [](int rank, Communicator& communicator) {
    std::vector<std::shared_ptr<Communicator>> pairs;  // of each rank with the next one
    for (int first = 0; first < 3; ++first) {
      int second = (first + 1) % 3;
      bool member = rank == first || rank == second;
      pairs.push_back(communicator.split(member ? std::vector<int>{first, second} : std::vector<int>{}));
    }
    std::vector<float> data(100);
    auto start = Clock::now();
    const auto text = CHECK_THROWS(pairs[rank]->run(all_reduce_of(data)), ErrorKind::Mismatch);
    communicator.abort(ErrorKind::Mismatch, text);
    for (const char* each : {"for rank 0", "for rank 1", "for rank 2"}) CHECK(contains(text, each));
    CHECK(Clock::now() - start < seconds(15));
  });
}

// A wait that the program itself gives up on may be followed by the call that the other rank waits for.
TEST(a_wait_with_a_timeout_of_its_own_is_no_cycle) {
  run_counting_threads(2, [](int rank, Communicator& communicator) {
    auto probe = communicator.split({0, 1});
    std::vector<float> data(100, 1.0f), asked(100);
    if (rank == 0) {
      auto work = probe->submit(all_reduce_of(asked));
      CHECK_THROWS(probe->wait(work, {}, seconds(0.8)), ErrorKind::Timeout);
    }
    communicator.run(all_reduce_of(data));
    CHECK_EQ(data[99], 2.0f);
  });
}

// More calls than a lane opens at once: that a peer's later ones are not open yet does not mean that it never makes
// them.
TEST(who_waits_further_on_is_no_cycle) {
  constexpr int kCalls = 100;
  run_counting_threads(3, [](int rank, Communicator& communicator) {
    std::vector<float> data(kCalls, 1.0f);
    std::vector<std::shared_ptr<Work>> works;
    auto submit_until = [&](int count) {
      while (static_cast<int>(works.size()) < count)
        works.push_back(communicator.submit(all_reduce_of(&data[works.size()], sizeof(float))));
    };
    if (rank == 2) std::this_thread::sleep_for(std::chrono::milliseconds(900));
    if (rank == 1) {
      submit_until(81);
      communicator.wait(works[80]);
    }
    submit_until(kCalls);
    communicator.wait(works[kCalls - 1]);
    for (float value : data) CHECK_EQ(value, 3.0f);
  });
}

// Long waits, here and there, that all end: boards and calls change under those who read them.
TEST(slow_but_valid_programs_are_left_alone) {
  constexpr int kRounds = 24, kSize = 3;
  run_counting_threads(kSize, [](int rank, Communicator& communicator) {
    std::vector<std::shared_ptr<Communicator>> groups;
    for (int out = 0; out < kSize; ++out) {
      std::vector<int> members{0, 1, 2};
      std::erase(members, out);
      groups.push_back(communicator.split(rank == out ? std::vector<int>{} : members));
    }
    auto slots = communicator.reserve_slots(1);
    std::mt19937 same(7), different(rank);
    for (int round = 0; round < kRounds; ++round) {
      if (different() % 2) std::this_thread::sleep_for(std::chrono::milliseconds(different() % 150));
      float value = 1.0f;
      size_t choice = same() % 5;
      if (choice < 3) {
        if (groups[choice]) groups[choice]->run(all_reduce_of(&value, 4));
      } else if (choice == 3) {
        communicator.run(all_reduce_of(&value, 4));
      } else {
        communicator.wait(communicator.announce(slots, 0, 1, all_reduce_of(&value, 4)));
      }
    }
  });
}

}  // namespace syncengine
