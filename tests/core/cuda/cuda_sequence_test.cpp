// GPU sequences on threads: results against the CPU's kernels, eager calls and replays of a captured graph mixed,
// aborts.
#include <atomic>
#include <vector>

#include "cuda_cases.h"
#include "cuda_twin.h"

namespace syncengine {

namespace {

using testing::Case;
using testing::expected;
using testing::operation_of;
using testing::run_ranks;
using testing::Tensors;
using testing::TwinGroup;
using testing::TwinSteps;

constexpr size_t kSlot = 640;  // bytes of half a staging buffer: small, so that a tensor takes several chunks

cuda::Route route_of(const Case& c, std::vector<Operation>& operations) {
  cuda::Route route{.path = c.path};
  if (c.path == Path::Direct)
    for (auto& operation : operations) route.memories.push_back(operation.input);
  return route;
}

void run_case(const Case& c, int world) {
  TwinGroup group(world, kSlot, c.one_kernel);
  std::vector<Tensors> tensors;
  for (int rank = 0; rank < world; ++rank) tensors.emplace_back(c, rank, world);
  std::vector<Operation> operations;
  for (auto& mine : tensors) operations.push_back(operation_of(c, mine));
  for (auto& mine : tensors) mine.fill(c.dtype, 0);
  auto before = tensors;
  const auto route = route_of(c, operations);
  run_ranks(world, [&](int rank) {
    TwinSteps steps(rank, group.controls);
    cuda::run_sequence(operations[rank], group.site(rank), route, cuda::fingerprint(operations[rank], c.path, 0),
                       steps);
  });
  for (int rank = 0; rank < world; ++rank) {
    CHECK(tensors[rank].result() == expected(c, before, rank));
    CHECK(group.controls[rank]->mismatch[0] == 0 && group.controls[rank]->progress > 0);
  }
}

void run_cases(Collective collective) {
  for (int world : {1, 2, 3, 5, 8}) {
    if (collective == Collective::Broadcast && world == 1) continue;
    for (Path path : {Path::OneShot, Path::Staged, Path::Direct})
      for (size_t count : {0, 1, 37, 150, 700}) {
        run_case({collective, path, Numerics::RankOrder, DType::Float32, count}, world);
        if (testing::kSlowdown > 1) continue;
        run_case({collective, path, Numerics::Ring, DType::BFloat16, count}, world);
        bool reduces = collective == Collective::AllReduce || collective == Collective::ReduceScatter;
        if (reduces && path != Path::Direct)
          run_case({collective, path, Numerics::Ring, DType::Float32, count, 1.0 / 3}, world);
      }
  }
}

}  // namespace

TEST(cuda_sequences_of_all_reduce) { run_cases(Collective::AllReduce); }
TEST(cuda_small_all_reduce_in_one_kernel) {
  for (int world : {1, 2, 3, 8})
    for (size_t count : {1, 5, 37, 150, 4000}) {
      run_case({.collective = Collective::AllReduce, .path = Path::OneShot, .count = count, .one_kernel = true}, world);
      run_case({.collective = Collective::AllReduce,
                .path = Path::OneShot,
                .dtype = DType::BFloat16,
                .count = count,
                .one_kernel = true},
               world);
    }
}
TEST(cuda_sequences_of_reduce_scatter) { run_cases(Collective::ReduceScatter); }
TEST(cuda_sequences_of_all_gather) { run_cases(Collective::AllGather); }
TEST(cuda_sequences_of_broadcast) { run_cases(Collective::Broadcast); }

// Kernels take the own lengths for the peers' on the direct path.
TEST(cuda_fingerprints_say_how_long_each_piece_is) {
  std::vector<std::byte> memory(64);
  auto operation_of_pieces = [&](size_t first) {
    Operation operation{};
    operation.input.add(memory.data(), first);
    operation.input.add(memory.data() + 32, 24 - first);
    operation.output = operation.input;
    return operation;
  };
  const auto one = operation_of_pieces(8), other = operation_of_pieces(16);
  CHECK(cuda::fingerprint(one, Path::Direct, 0) != cuda::fingerprint(other, Path::Direct, 0));
  CHECK_EQ(cuda::fingerprint(one, Path::Staged, 0), cuda::fingerprint(other, Path::Staged, 0));
}

// A step of four collectives, captured once; eager calls before, between and after replays; ranks are late in turn.
TEST(cuda_graphs_replay_between_eager_calls) {
  constexpr int kWorld = 3;
  const int rounds = 300 / testing::kSlowdown;
  const Case large{Collective::AllReduce, Path::Staged, Numerics::RankOrder, DType::Float32, 400};
  const Case direct{Collective::AllReduce, Path::Direct, Numerics::RankOrder, DType::Float32, 100};
  const Case barrier{Collective::Barrier, Path::Staged};
  const Case small{.collective = Collective::AllReduce, .path = Path::OneShot, .count = 30};
  TwinGroup group(kWorld, kSlot, true);
  std::vector<Tensors> a, b, s;
  for (int rank = 0; rank < kWorld; ++rank) {
    a.emplace_back(large, rank, kWorld);
    b.emplace_back(direct, rank, kWorld);
    s.emplace_back(small, rank, kWorld);
  }
  std::vector<Operation> as, bs, ss;
  for (auto& tensors : s) {
    ss.push_back(operation_of(small, tensors));
    ss.back().input = ss.back().output = {tensors.input.data(), tensors.input.size()};  // one span
  }
  for (auto& tensors : a) as.push_back(operation_of(large, tensors));
  for (auto& tensors : b) bs.push_back(operation_of(direct, tensors));
  const auto route = route_of(direct, bs);
  run_ranks(kWorld, [&](int rank) {
    TwinSteps steps(rank, group.controls);
    const auto site = group.site(rank);
    Operation nothing = operation_of(barrier, a[rank]);
    auto all = [&](bool with_barrier) {
      cuda::run_sequence(as[rank], site, {}, cuda::fingerprint(as[rank], Path::Staged, 0), steps);
      cuda::run_sequence(ss[rank], site, {.path = Path::OneShot}, cuda::fingerprint(ss[rank], Path::OneShot, 0), steps);
      cuda::run_sequence(bs[rank], site, route, cuda::fingerprint(bs[rank], Path::Direct, 0), steps);
      if (with_barrier) cuda::run_sequence(nothing, site, {}, cuda::fingerprint(nothing, Path::Staged, 0), steps);
    };
    steps.begin_capture();
    all(true);
    steps.end_capture();
    for (int round = 0; round < rounds; ++round) {
      a[rank].fill(DType::Float32, round);
      b[rank].fill(DType::Float32, round);
      s[rank].fill(DType::Float32, round);
      std::vector<Tensors> as_were, bs_were, ss_were;
      for (int peer = 0; peer < kWorld; ++peer) {
        as_were.emplace_back(large, peer, kWorld).fill(DType::Float32, round);
        ss_were.emplace_back(small, peer, kWorld).fill(DType::Float32, round);
        bs_were.emplace_back(direct, peer, kWorld).fill(DType::Float32, round);
      }
      if (round % kWorld == rank) std::this_thread::sleep_for(std::chrono::microseconds(200));
      if (round % 5 == 3) {
        all(false);
      } else {
        steps.replay();
      }
      CHECK(a[rank].input == expected(large, as_were, rank));
      CHECK(s[rank].input == expected(small, ss_were, rank));
      CHECK(b[rank].input == expected(direct, bs_were, rank));
    }
  });
}

// Ranks that call different things write no sum: all ones, which is NaN; and each knows whose call differs.
TEST(cuda_mismatch_poisons_the_result) {
  TwinGroup group(2, kSlot);
  const Case c{Collective::AllReduce, Path::OneShot, Numerics::RankOrder, DType::Float32, 10};
  std::vector<Tensors> tensors{{c, 0, 2}, {c, 1, 2}};
  run_ranks(2, [&](int rank) {
    tensors[rank].fill(DType::Float32, 0);
    Operation operation = operation_of(c, tensors[rank]);
    if (rank == 1) operation.op = ReduceOp::Max;
    TwinSteps steps(rank, group.controls);
    cuda::run_sequence(operation, group.site(rank), {.path = c.path}, cuda::fingerprint(operation, c.path, 0), steps);
    for (std::byte byte : tensors[rank].input) CHECK(byte == std::byte{0xff});
    CHECK_EQ(group.controls[rank]->mismatch[0], 2u - rank);
  });
}

// A peer never comes: releasing the words ends every wait that is left, and no result looks like one.
TEST(cuda_release_ends_all_waits_and_poisons) {
  TwinGroup group(2, kSlot);
  const Case c{Collective::AllReduce, Path::Staged, Numerics::RankOrder, DType::Float32, 500};
  Tensors tensors(c, 0, 2);
  tensors.fill(DType::Float32, 0);
  Operation operation = operation_of(c, tensors);
  std::atomic<bool> ended = false;
  std::thread watchdog([&] {
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
    while (!ended.load(std::memory_order_relaxed)) {  // again and again: the stream makes words 0 after each wait
      for (auto& set : group.controls[0]->inbox) cuda::store(set[1], cuda::kReleased);
      std::this_thread::yield();
    }
  });
  TwinSteps steps(0, group.controls);
  // Words of the absent peer keep what was put there: it does not take them away.
  std::thread absent([&] {
    while (!ended.load(std::memory_order_relaxed)) {
      for (auto& set : group.controls[1]->inbox) cuda::store(set[0], 0);
      std::this_thread::yield();
    }
  });
  steps.orderly = false;
  for (int call = 0; call < 3; ++call)
    cuda::run_sequence(operation, group.site(0), {}, cuda::fingerprint(operation, Path::Staged, 0), steps);
  ended = true;
  watchdog.join();
  absent.join();
  for (std::byte byte : tensors.input) CHECK(byte == std::byte{0xff});
}

// A peer dies after it has let this rank read its tensor, and before it has reduced its part: of what it owed nothing
// looks like a result.
TEST(cuda_death_between_exchanges_poisons_what_the_peer_owed) {
  TwinGroup group(2, kSlot);
  const Case c{Collective::AllReduce, Path::Direct, Numerics::RankOrder, DType::Float32, 100};
  std::vector<Tensors> tensors{{c, 0, 2}, {c, 1, 2}};
  std::vector<Operation> operations;
  for (auto& mine : tensors) {
    mine.fill(DType::Float32, 0);
    operations.push_back(operation_of(c, mine));
  }
  auto before = tensors;
  const auto result = expected(c, before, 0);
  const uint32_t mark = cuda::fingerprint(operations[0], c.path, 0);
  cuda::store(group.controls[0]->inbox[0][1], mark);  // all that the peer still did
  std::atomic<bool> ended = false;
  std::thread watchdog([&] {
    while (cuda::load(group.controls[0]->progress) == 0) std::this_thread::yield();
    std::this_thread::sleep_for(std::chrono::milliseconds(20));  // the own part is reduced
    while (!ended.load(std::memory_order_relaxed)) {
      for (auto& set : group.controls[0]->inbox) cuda::store(set[1], cuda::kReleased);
      std::this_thread::yield();
    }
  });
  TwinSteps steps(0, group.controls);
  steps.orderly = false;
  cuda::run_sequence(operations[0], group.site(0), route_of(c, operations), mark, steps);
  ended = true;
  watchdog.join();
  const auto& got = tensors[0].input;
  size_t poisoned = 0;
  for (size_t i = 0; i < got.size(); i += 4) {
    const bool is_result = std::equal(&got[i], &got[i] + 4, &result[i]);
    const bool is_poison = std::all_of(&got[i], &got[i] + 4, [](std::byte b) { return b == std::byte{0xff}; });
    CHECK(is_result || is_poison);
    poisoned += is_poison;
  }
  CHECK(poisoned > 0 && poisoned < 100);
}

}  // namespace syncengine
