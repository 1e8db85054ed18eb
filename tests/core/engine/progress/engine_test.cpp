// The engine with ranks as threads: every collective on every path against sums computed here, and any order of
// buckets.
#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <fstream>
#include <latch>
#include <numeric>
#include <random>
#include <span>

#include "job.h"

namespace syncengine {

using testing::all_reduce_of;
using testing::contains;
using testing::run_job;

namespace {

// A small integer that depends on rank and place: sums are exact in any order.
float value(int rank, size_t i) { return static_cast<float>((i * 7 + static_cast<size_t>(rank) * 13) % 64); }

float sum_of_values(int size, size_t i) {
  float sum = 0;
  for (int rank = 0; rank < size; ++rank) sum += value(rank, i);
  return sum;
}

#if defined(__SANITIZE_THREAD__) || defined(__SANITIZE_ADDRESS__)
const std::vector<size_t> kCounts = {0, 1, 3, 1000, 70001};
#else
const std::vector<size_t> kCounts = {0, 1, 3, 1000, 4097, 40000, 200003};
#endif

template <class Expected>
void check_values(const float* data, size_t count, Expected&& expected) {
  for (size_t i = 0; i < count; ++i) {
    if (data[i] != expected(i)) CHECK_EQ(data[i], expected(i));  // the slow check only to say so
  }
}

void check_all_reduce(Communicator& communicator, float* data, size_t count) {
  for (size_t i = 0; i < count; ++i) data[i] = value(communicator.rank(), i);
  communicator.run(all_reduce_of(data, count * sizeof(float), DType::Float32));
  check_values(data, count, [&](size_t i) { return sum_of_values(communicator.size(), i); });
}

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
  for (Algorithm algorithm : {Algorithm::Auto, Algorithm::Direct, Algorithm::Staged, Algorithm::OneShot}) {
    for (Numerics numerics : {Numerics::RankOrder, Numerics::Ring}) {
      for (int size : {2, 3, 5, 8}) {
        Options options;
        options.algorithm = algorithm;
        options.numerics = numerics;
        run_job(size, options, [](int, Communicator& communicator) {
          for (size_t count : kCounts) {
            std::vector<float> ordinary(count);
            check_all_reduce(communicator, ordinary.data(), count);
            auto shared = communicator.allocate(count * sizeof(float));
            check_all_reduce(communicator, static_cast<float*>(shared.get()), count);
          }
        });
      }
    }
  }
}

TEST(tensors_of_which_only_some_lie_in_the_arena) {
  run_job(3, {}, [](int rank, Communicator& communicator) {
    std::vector<float> ordinary(100000);
    auto shared = communicator.allocate(100000 * sizeof(float));
    for (int round = 0; round < 4; ++round) {
      check_all_reduce(communicator, rank == round ? static_cast<float*>(shared.get()) : ordinary.data(), 100000);
      check_all_reduce(communicator, static_cast<float*>(shared.get()), 100000);
    }
  });
}

TEST(other_collectives) {
  for (Algorithm algorithm : {Algorithm::Auto, Algorithm::Direct, Algorithm::Staged}) {
    for (int size : {2, 3, 8}) {
      Options options;
      options.algorithm = algorithm;
      run_job(size, options, [size](int rank, Communicator& communicator) {
        for (bool in_arena : {false, true}) {
          for (size_t count : kCounts) {
            std::vector<float> heap_part(count), heap_whole(count * size);
            auto arena_part = communicator.allocate(count * 4), arena_whole = communicator.allocate(count * size * 4);
            float* part = in_arena ? static_cast<float*>(arena_part.get()) : heap_part.data();
            float* whole = in_arena ? static_cast<float*>(arena_whole.get()) : heap_whole.data();

            Operation broadcast = all_reduce_of(part, count * 4, DType::Float32);
            broadcast.collective = Collective::Broadcast;
            broadcast.root = size - 1;
            for (size_t i = 0; i < count; ++i) part[i] = value(rank, i);
            communicator.run(broadcast);
            check_values(part, count, [&](size_t i) { return value(size - 1, i); });

            Operation gather{};
            gather.collective = Collective::AllGather;
            gather.input = SpanList(part, count * 4);
            gather.output = SpanList(whole, count * size * 4);
            for (size_t i = 0; i < count; ++i) part[i] = value(rank, i);
            communicator.run(gather);
            for (int peer = 0; peer < size; ++peer)
              check_values(whole + peer * count, count, [&](size_t i) { return value(peer, i); });

            Operation scatter{};
            scatter.collective = Collective::ReduceScatter;
            scatter.input = SpanList(whole, count * size * 4);
            scatter.output = SpanList(part, count * 4);
            for (size_t i = 0; i < count * size; ++i) whole[i] = value(rank, i);
            communicator.run(scatter);
            check_values(part, count, [&](size_t i) { return sum_of_values(size, rank * count + i); });

            Operation barrier{};
            barrier.collective = Collective::Barrier;
            communicator.run(barrier);
          }
        }
      });
    }
  }
}

TEST(announced_operations_complete_in_any_order) {
  constexpr int kBuckets = 40, kRounds = 5;
  run_job(4, {}, [](int rank, Communicator& communicator) {
    auto slots = communicator.reserve_slots(kBuckets);
    std::mt19937 random(rank);
    for (int round = 0; round < kRounds; ++round) {
      std::vector<std::vector<float>> buckets(kBuckets);
      std::vector<int> order(kBuckets);
      std::iota(order.begin(), order.end(), 0);
      std::shuffle(order.begin(), order.end(), random);
      std::vector<std::shared_ptr<Work>> works;
      for (int bucket : order) {
        auto& data = buckets[bucket];
        data.resize(bucket * 1000 + 1);
        for (size_t i = 0; i < data.size(); ++i) data[i] = value(rank, i + bucket);
        works.push_back(communicator.announce(slots, bucket, round + 1,
                                              all_reduce_of(data.data(), data.size() * 4, DType::Float32)));
        if (bucket % 7 == 0) {  // the user's own calls go on in between
          std::vector<float> own(bucket + 10);
          check_all_reduce(communicator, own.data(), 10);
        }
      }
      for (auto& work : works) communicator.wait(work);
      for (int bucket = 0; bucket < kBuckets; ++bucket)
        check_values(buckets[bucket].data(), buckets[bucket].size(),
                     [&](size_t i) { return sum_of_values(4, i + bucket); });
    }
  });
}

TEST(calls_in_flight_on_the_same_memory_have_the_effect_of_their_order) {
  for (Algorithm algorithm : {Algorithm::Auto, Algorithm::Direct, Algorithm::Staged, Algorithm::OneShot}) {
    for (int size : {2, 3}) {
      Options options;
      options.algorithm = algorithm;
      run_job(size, options, [](int rank, Communicator& communicator) {
        for (size_t count : {size_t{10}, size_t{1000}, size_t{70001}}) {
          std::vector<float> ordinary(count);
          auto shared = communicator.allocate(count * sizeof(float));
          for (float* data : {ordinary.data(), static_cast<float*>(shared.get())}) {
            for (size_t i = 0; i < count; ++i) data[i] = static_cast<float>(rank);
            const auto all = [&] { return all_reduce_of(data, count * sizeof(float), DType::Float32); };
            Operation from_last{.collective = Collective::Broadcast, .dtype = DType::Float32};
            from_last.root = communicator.size() - 1;
            from_last.input = from_last.output = SpanList(data, count * sizeof(float));
            const Operation half = all_reduce_of(data + count / 2, (count - count / 2) * sizeof(float), DType::Float32);
            std::vector<std::shared_ptr<Work>> works;
            for (Operation operation : {std::move(from_last), all(), half, all()})
              works.push_back(communicator.submit(std::move(operation)));
            for (const auto& work : works) communicator.wait(work);
            const auto n = static_cast<float>(communicator.size());
            check_values(data, count, [&](size_t i) { return (n - 1) * n * n * (i < count / 2 ? 1 : n); });
          }
        }
      });
    }
  }
}

TEST(asynchronous_work_ends_without_anybody_waiting) {
  run_job(3, {}, [](int rank, Communicator& communicator) {
    std::vector<float> data(300000, static_cast<float>(rank + 1));
    auto work = communicator.submit(all_reduce_of(data.data(), data.size() * 4, DType::Float32));
    for (int i = 0; i < 20000 && !work->ended(); ++i) std::this_thread::sleep_for(std::chrono::milliseconds(1));
    CHECK(work->state() == Work::State::Done);
    CHECK_EQ(data.front(), 6.0f);
    CHECK_EQ(data.back(), 6.0f);
  });
}

TEST(split_groups_work_side_by_side) {
  run_job(4, {}, [](int rank, Communicator& communicator) {
    auto pair = communicator.split(rank % 2 ? std::vector<int>{1, 3} : std::vector<int>{0, 2});
    auto odd = communicator.split(rank == 3 ? std::vector<int>{} : std::vector<int>{0, 1, 2});
    CHECK_EQ(pair->rank(), rank / 2);
    CHECK_EQ(odd == nullptr, rank == 3);
    for (int round = 0; round < 20; ++round) {
      std::vector<float> a(1000, static_cast<float>(rank)), b(50000, static_cast<float>(rank)), c(10, 1.0f);
      auto first = pair->submit(all_reduce_of(a.data(), a.size() * 4, DType::Float32));
      if (odd) odd->run(all_reduce_of(b.data(), b.size() * 4, DType::Float32));
      communicator.run(all_reduce_of(c.data(), c.size() * 4, DType::Float32));
      pair->wait(first);
      CHECK_EQ(a[999], rank % 2 ? 4.0f : 2.0f);
      if (odd) CHECK_EQ(b[49999], 3.0f);
      CHECK_EQ(c[0], 4.0f);
    }
  });
}

// Members that drop theirs at any time; some results are still to be read by others then.
TEST(dropped_groups_give_their_memory_back) {
  constexpr int kGroups = 200;
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
  Options options;
  options.arena_bytes = 128 << 20;  // room for about ten at once
  run_job(3, options, [&](int rank, Communicator& communicator) {
    std::mt19937 random(rank);
    std::vector<float> data(100000), part(data.size() / 2);
    for (int round = 0; round < kGroups; ++round) {
      int out = round % 3;
      std::vector<int> members;
      for (int member = 0; member < 3; ++member)
        if (member != out) members.push_back(member);
      auto group = communicator.split(rank == out ? std::vector<int>{} : members);
      if (!group) continue;
      check_all_reduce(*group, data.data(), data.size());
      Operation scatter{};
      scatter.collective = Collective::ReduceScatter;
      scatter.input = SpanList(data.data(), data.size() * 4);
      scatter.output = SpanList(part.data(), part.size() * 4);
      group->run(scatter);
      CHECK_EQ(part[7], 2.0f * sum_of_values(2, group->rank() * part.size() + 7));
      if (random() % 3 == 0) std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
    communicator.run(Operation{.collective = Collective::Barrier});
    if (rank == 0) CHECK(shared_kib() < 64 << 10);  // all mappings of all ranks: each page counts three times
  });
}

TEST(mismatches_name_both_sides) {
  run_job(3, {}, [](int rank, Communicator& communicator) {
    std::vector<float> data(100);
    size_t count = rank == 2 ? 99 : 100;
    const auto text =
        CHECK_THROWS(communicator.run(all_reduce_of(data.data(), count * 4, DType::Float32)), ErrorKind::Mismatch);
    CHECK(contains(text, "100 elements") && contains(text, "99 elements") && contains(text, "rank 2"));
    CHECK_THROWS(communicator.run(all_reduce_of(data.data(), 4, DType::Float32)), ErrorKind::Mismatch);
  });
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
    for (const Span& span : pieces.spans())
      for (size_t i = 0; i < span.bytes / sizeof(float); ++i) reinterpret_cast<float*>(span.data)[i] = value(rank, i);
    communicator.run(Operation{.input = pieces, .output = pieces});
    for (const Span& span : pieces.spans())
      check_values(reinterpret_cast<float*>(span.data), span.bytes / sizeof(float),
                   [](size_t i) { return sum_of_values(3, i); });
    CHECK(communicator.counters().at("direct_bytes") > 0);
  });
}

TEST(timeouts_name_the_missing_ranks) {
  Options options;
  options.timeout = seconds(1.0);
  std::barrier others(2);
  run_job(3, options, [&](int rank, Communicator& communicator) {
    if (rank == 1) return testing::wait_for_failure(communicator);
    std::vector<float> data(100);
    others.arrive_and_wait();
    const auto text =
        CHECK_THROWS(communicator.run(all_reduce_of(data.data(), 400, DType::Float32)), ErrorKind::Timeout);
    CHECK(contains(text, "waits for rank 1 "));
  });
}

TEST(leaving_and_aborting_reach_those_who_wait) {
  run_job(3, {}, [](int rank, Communicator& communicator) {
    std::vector<float> data(100);
    if (rank == 0) return;  // leaves
    CHECK_THROWS(communicator.run(all_reduce_of(data.data(), 400, DType::Float32)), ErrorKind::PeerLost);
  });
  run_job(3, {}, [](int rank, Communicator& communicator) {
    std::vector<float> data(100);
    if (rank == 0) {
      communicator.abort(ErrorKind::Aborted, "rank 0: ValueError: bad batch");
      return;
    }
    const auto text =
        CHECK_THROWS(communicator.run(all_reduce_of(data.data(), 400, DType::Float32)), ErrorKind::Aborted);
    CHECK_EQ(text, "rank 0: ValueError: bad batch");
  });
}

// Rank 0's first thread has something to say about its wait, but stderr takes no more. Its second thread goes on.
TEST(a_line_that_nobody_reads_holds_up_no_other_thread) {
  Options options;
  options.log_after = seconds(0.3);
  FullStderr full;
  std::atomic<bool> done{false};
  std::jthread rescue([&] {
    for (int i = 0; i < 1000 && !done; ++i) std::this_thread::sleep_for(std::chrono::milliseconds(10));
    full.restore();
  });
  Duration took{};
  run_job(2, options, [&](int rank, Communicator& communicator) {
    auto slow = communicator.split({0, 1}), quick = communicator.split({0, 1});
    float a = 1.0f, b = 1.0f;
    auto wait_for_long = [&] { slow->run(all_reduce_of(&a, 4, DType::Float32)); };
    auto work = [&] {
      std::this_thread::sleep_for(std::chrono::milliseconds(700));
      auto start = Clock::now();
      quick->run(all_reduce_of(&b, 4, DType::Float32));
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
  CHECK(took < seconds(5));
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
        auto work = communicator.submit(all_reduce_of(shared.get(), kBytes, DType::Float32));
        if (pair) {
          std::this_thread::sleep_for(std::chrono::milliseconds(100));  // it has published where its tensor lies
          CHECK_THROWS(pair->run(all_reduce_of(theirs, kBytes - 4 * rank, DType::Float32)), ErrorKind::Mismatch);
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
