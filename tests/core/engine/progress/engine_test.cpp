// The engine with ranks as threads, of one host and of several: every collective on every path against sums computed
// here, and any order of buckets.
#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <fstream>
#include <latch>
#include <random>
#include <span>

#include "hosts_job.h"

namespace syncengine {

using testing::all_reduce_of, testing::check_all_reduce, testing::check_values, testing::contains, testing::fill;
using testing::run_hosts, testing::run_job, testing::run_on_each, testing::sum_of_values;

namespace {

const auto kCounts = testing::kSlowdown > 1 ? std::vector<size_t>{0, 1, 3, 1000, 70001}
                                            : std::vector<size_t>{0, 1, 3, 1000, 4097, 40000, 200003};
// Sanitizers leave out the largest for 8 ranks. It is staged in several chunks, which 5 ranks do, too.
std::span<const size_t> counts_for(int size) {
  return std::span(kCounts).first(kCounts.size() - (testing::kSlowdown > 1 && size == 8));
}
constexpr Algorithm kAlgorithms[] = {Algorithm::Auto, Algorithm::Direct, Algorithm::Staged, Algorithm::OneShot};

// Ordinary memory and some in the arena, for `count` elements each.
struct Memories {
  Memories(Communicator& communicator, size_t count)
      : ordinary(count),
        allocated(communicator.allocate(count * sizeof(float))),
        shared(static_cast<float*>(allocated.get()), count) {}
  std::vector<float> ordinary;
  std::shared_ptr<void> allocated;
  std::span<float> shared;
};

// While it lives, writing to stderr blocks, until restore().
class FullStderr {
 public:
  FullStderr() {
    CHECK(pipe2(pipe_, O_NONBLOCK | O_CLOEXEC) == 0);
    char bytes[4096] = {};
    while (write(pipe_[1], bytes, sizeof(bytes)) > 0) continue;
    fcntl(pipe_[1], F_SETFL, 0);
    dup2(pipe_[1], STDERR_FILENO);
  }
  ~FullStderr() {
    restore();
    close(saved_);
    close(pipe_[0]);
    close(pipe_[1]);
  }
  void restore() {
    dup2(saved_, STDERR_FILENO);
    char bytes[4096];
    while (read(pipe_[0], bytes, sizeof(bytes)) > 0) continue;
  }

 private:
  int saved_ = dup(STDERR_FILENO);
  int pipe_[2];
};

}  // namespace

TEST(all_reduce_on_every_path_and_size) {
  for (Algorithm algorithm : kAlgorithms) {
    for (Numerics numerics : {Numerics::RankOrder, Numerics::Ring}) {
      for (int size : {2, 3, 5, 8}) {
        run_job(size, {.numerics = numerics, .algorithm = algorithm}, [size](int, Communicator& communicator) {
          for (size_t count : counts_for(size)) {
            Memories data(communicator, count);
            check_all_reduce(communicator, data.ordinary);
            check_all_reduce(communicator, data.shared);
          }
        });
      }
    }
  }
}

TEST(tensors_of_which_only_some_lie_in_the_arena) {
  run_job(3, {}, [](int rank, Communicator& communicator) {
    Memories data(communicator, 100000);
    for (int round = 0; round < 4; ++round) {
      check_all_reduce(communicator, rank == round ? data.shared : data.ordinary);
      check_all_reduce(communicator, data.shared);
    }
  });
}

TEST(other_collectives) {
  for (Algorithm algorithm : {Algorithm::Auto, Algorithm::Direct, Algorithm::Staged}) {
    for (int size : {2, 3, 8}) {
      run_job(size, {.algorithm = algorithm}, [size](int, Communicator& communicator) {
        for (size_t count : counts_for(size)) {
          Memories part(communicator, count), whole(communicator, count * size);
          testing::check_collectives(communicator, part.ordinary, whole.ordinary);
          testing::check_collectives(communicator, part.shared, whole.shared);
        }
      });
    }
  }
}

TEST(announced_operations_complete_in_any_order) {
  constexpr int kBuckets = 40, kSteps = testing::kSlowdown > 1 ? 3 : 6;
  run_on_each({"aaaa", "ab", "aabb", "abbb", "abab"}, {}, [](int rank, Communicator& communicator) {
    auto slots = communicator.reserve_slots(kBuckets);
    std::mt19937 random(rank);
    std::vector<std::vector<float>> buckets(kBuckets);
    for (int step = 0; step < kSteps; ++step) {
      std::vector<std::shared_ptr<Work>> works;
      for (size_t bucket : testing::shuffled(kBuckets, random)) {
        auto& data = buckets[bucket];
        data.resize(bucket * (bucket > 35 ? 1000 : 1000 / testing::kSlowdown) + 1);  // some in several chunks
        fill(data, rank, bucket);
        works.push_back(communicator.announce(slots, bucket, step + 1, all_reduce_of(data)));
        if (bucket % 7 == 0) {  // the user's own calls go on in between
          std::vector<float> own(10);
          check_all_reduce(communicator, own);
        }
      }
      for (auto& work : works) communicator.wait(work);
      for (int bucket = 0; bucket < kBuckets; ++bucket)
        check_values(buckets[bucket], [&](size_t i) { return sum_of_values(communicator.size(), i + bucket); });
    }
  });
}

TEST(calls_in_flight_on_the_same_memory_have_the_effect_of_their_order) {
  for (Algorithm algorithm : kAlgorithms) {
    run_on_each({"aa", "aaa", "ab", "aab"}, {.algorithm = algorithm}, [](int rank, Communicator& communicator) {
      for (size_t count : {size_t{10}, size_t{1000}, size_t{70001}}) {
        Memories memories(communicator, count);
        for (std::span<float> data : {std::span(memories.ordinary), memories.shared}) {
          std::ranges::fill(data, static_cast<float>(rank));
          const Operation all = all_reduce_of(data.data(), data.size_bytes());
          Operation from_last = all;
          from_last.collective = Collective::Broadcast;
          from_last.root = communicator.size() - 1;
          const auto rest = data.subspan(count / 2);
          std::vector<std::shared_ptr<Work>> works;
          for (const Operation& operation : {from_last, all, all_reduce_of(rest.data(), rest.size_bytes()), all})
            works.push_back(communicator.submit(operation));
          for (const auto& work : works) communicator.wait(work);
          const auto n = static_cast<float>(communicator.size());
          check_values(data, [&](size_t i) { return (n - 1) * n * n * (i < count / 2 ? 1 : n); });
        }
      }
    });
  }
}

// Members that drop theirs at any time; some results are still to be read by others then.
TEST(dropped_groups_give_their_memory_back) {
  constexpr int kGroups = 200 / testing::kSlowdown;
  auto shared_kib = [] {
    size_t total = 0;
    bool ours = false;
    std::ifstream file("/proc/self/smaps");
    for (std::string line; std::getline(file, line);) {
      if (line.find('-') < 17 && line.find(' ') > 17) ours = line.find("memfd:syncengine") != std::string::npos;
      if (ours && line.starts_with("Rss:")) total += std::stoull(line.substr(4));
    }
    return total;
  };
  // In an arena with room for about ten at once.
  run_job(3, {.arena_bytes = 128 << 20}, [&](int rank, Communicator& communicator) {
    std::mt19937 random(rank);
    std::vector<float> data(100000), part(data.size() / 2);
    for (int round = 0; round < kGroups; ++round) {
      int out = round % 3;
      std::vector<int> members{0, 1, 2};
      std::erase(members, out);
      auto group = communicator.split(rank == out ? std::vector<int>{} : members);
      if (!group) continue;
      check_all_reduce(*group, data);
      group->run({.collective = Collective::ReduceScatter,
                  .input = {data.data(), data.size() * 4},
                  .output = {part.data(), part.size() * 4}});
      CHECK_EQ(part[7], 2.0f * sum_of_values(2, group->rank() * part.size() + 7));
      if (rank == 0 && round == 1) CHECK(shared_kib() > 0);
      if (random() % 3 == 0) std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
    communicator.run(Operation{.collective = Collective::Barrier});
    if (rank == 0) CHECK(shared_kib() < 64 << 10);  // all mappings of all ranks: each page counts three times
  });
}

TEST(mismatches_name_both_sides) {
  for (auto [usual, last] : {std::pair<size_t, size_t>{100, 99}, {100, 100000}, {100000, 100}, {100000, 99999}}) {
    run_on_each({"aaa", "ab", "aabb", "abbb"}, {}, [usual = usual, last = last](int rank, Communicator& communicator) {
      const int other = communicator.size() - 1;
      std::vector<float> data(rank == other ? last : usual), one(1);
      const auto text = CHECK_THROWS(communicator.run(all_reduce_of(data)), ErrorKind::Mismatch);
      CHECK(contains(text, std::to_string(usual) + " elements") && contains(text, std::to_string(last) + " elements"));
      CHECK(contains(text, "rank " + std::to_string(other)));
      CHECK_THROWS(communicator.run(all_reduce_of(one)), ErrorKind::Mismatch);
    });
  }
}

// Where one rank has a longer piece of memory than another, it would read and write beyond the other's.
TEST(pieces_of_other_lengths_are_a_mismatch) {
  constexpr size_t kLong = 32 << 10, kShort = 16 << 10;
  run_job(2, {}, [](int rank, Communicator& communicator) {
    auto memory = communicator.allocate(kLong + 3 * kShort);
    auto* data = static_cast<float*>(memory.get());
    const auto all = std::span(data, (kLong + 3 * kShort) / sizeof(float));
    std::ranges::fill(all, rank + 1.0f);
    SpanList pieces;  // rank 0's first one is short, and what follows it is not in the call
    pieces.add(data + (rank == 0 ? 0 : 2 * kShort / sizeof(float)), rank == 0 ? kShort : kLong);
    pieces.add(data + (rank == 0 ? 2 * kShort / sizeof(float) : 0), rank == 0 ? kLong : kShort);
    Operation operation{.input = pieces, .output = pieces};
    const auto text = CHECK_THROWS(communicator.run(operation), ErrorKind::Mismatch);
    CHECK(contains(text, "in other pieces"));
    CHECK(std::ranges::all_of(all, [&](float value) { return value == rank + 1.0f; }));
  });
}

TEST(pieces_of_the_same_lengths_lie_anywhere) {
  constexpr size_t kCount = 5000;
  run_job(3, {}, [](int rank, Communicator& communicator) {
    auto memory = communicator.allocate(3 * kCount * sizeof(float));
    auto* data = static_cast<float*>(memory.get());
    SpanList pieces;
    pieces.add(data + (rank == 1 ? 2 * kCount : 0), kCount * sizeof(float));
    pieces.add(data + kCount, kCount / 2 * sizeof(float));
    auto floats = [](const Span& span) {
      return std::span(reinterpret_cast<float*>(span.data), span.bytes / sizeof(float));
    };
    for (const Span& span : pieces.spans()) fill(floats(span), rank);
    communicator.run(Operation{.input = pieces, .output = pieces});
    for (const Span& span : pieces.spans()) check_values(floats(span), [](size_t i) { return sum_of_values(3, i); });
    CHECK(communicator.counters().at("direct_bytes") > 0);
  });
}

TEST(timeouts_name_the_missing_ranks) {
  constexpr std::pair<const char*, int> kJobs[] = {{"aaa", 1}, {"aabb", 3}};
  testing::run_ranks(2, [&](int job) {  // side by side, as both only wait
    const auto [hosts, missing] = kJobs[job];
    std::barrier others(static_cast<std::ptrdiff_t>(std::strlen(hosts)) - 1);
    run_hosts(hosts, {.timeout = seconds(3)}, [&, missing = missing](int rank, Communicator& communicator) {
      if (rank == missing) return testing::wait_for_failure(communicator);
      std::vector<float> data(100);
      others.arrive_and_wait();
      const auto text = CHECK_THROWS(communicator.run(all_reduce_of(data)), ErrorKind::Timeout);
      CHECK(contains(text, "waits for rank " + std::to_string(missing) + " "));
    });
  });
}

TEST(leaving_and_aborting_reach_those_who_wait) {
  for (auto [hosts, who] : {std::pair{"aaa", 0}, {"aabb", 0}, {"aabb", 3}}) {
    run_hosts(hosts, {}, [who = who](int rank, Communicator& communicator) {
      std::vector<float> data(100);
      if (rank == who) return;  // leaves
      const auto text = CHECK_THROWS(communicator.run(all_reduce_of(data)), ErrorKind::PeerLost);
      CHECK(contains(text, "rank " + std::to_string(who) + " has left"));
    });
    run_hosts(hosts, {}, [who = who](int rank, Communicator& communicator) {
      std::vector<float> data(100);
      if (rank == who) return communicator.abort(ErrorKind::Aborted, "rank 0: ValueError: bad batch");
      const auto text = CHECK_THROWS(communicator.run(all_reduce_of(data)), ErrorKind::Aborted);
      CHECK_EQ(text, "rank 0: ValueError: bad batch");
    });
  }
}

// Rank 0's first thread has something to say about its wait, but stderr takes no more. Its second thread goes on.
TEST(a_line_that_nobody_reads_holds_up_no_other_thread) {
  FullStderr full;
  std::atomic<bool> done{false};
  std::jthread rescue([&] {
    for (int i = 0; i < 4000 && !done; ++i) std::this_thread::sleep_for(std::chrono::milliseconds(10));
    full.restore();
  });
  Duration took{};
  run_job(2, {.log_after = seconds(0.3)}, [&](int rank, Communicator& communicator) {
    auto slow = communicator.split({0, 1}), quick = communicator.split({0, 1});
    float a = 1.0f, b = 1.0f;
    auto wait_for_long = [&] { slow->run(all_reduce_of(&a, 4)); };
    auto work = [&] {
      std::this_thread::sleep_for(std::chrono::milliseconds(700));
      auto start = Clock::now();
      quick->run(all_reduce_of(&b, 4));
      if (rank == 0) took = Clock::now() - start;
      done = true;
    };
    if (rank == 0) {
      testing::run_ranks(2, [&](int thread) { thread == 0 ? wait_for_long() : work(); });
    } else {
      work();
      wait_for_long();
    }
    CHECK_EQ(a + b, 4.0f);
  });
  CHECK(took < seconds(15));
}

// A failure cuts loose the pages that it left half done. Whoever uses them elsewhere fails with it, nobody else.
TEST(a_failed_group_takes_along_direct_operations_in_the_same_memory) {
  constexpr size_t kBytes = 4 << 20;
  for (size_t begin : {kBytes - shm::kPage, kBytes}) {
    std::latch failed(2);
    run_job(3, {}, [&](int rank, Communicator& communicator) {
      auto pair = communicator.split(rank == 1 ? std::vector<int>{} : std::vector<int>{0, 2});
      auto shared = communicator.allocate(2 * kBytes);
      auto* theirs = static_cast<std::byte*>(shared.get()) + begin;
      if (rank == 1) failed.wait();
      auto run = [&] {
        auto work = communicator.submit(all_reduce_of(shared.get(), kBytes));
        if (pair) {
          std::this_thread::sleep_for(std::chrono::milliseconds(100));  // it has published where its tensor lies
          CHECK_THROWS(pair->run(all_reduce_of(theirs, kBytes - 4 * rank)), ErrorKind::Mismatch);
          failed.count_down();
        }
        communicator.wait(work);
      };
      if (begin < kBytes)
        CHECK_THROWS(run(), ErrorKind::Mismatch);
      else
        run();
    });
  }
}

}  // namespace syncengine
