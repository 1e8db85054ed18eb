// GPU sequences on threads: results against the CPU's kernels, eager calls and replays of a captured graph mixed,
// aborts.
#include <cstring>
#include <functional>
#include <vector>

#include "cuda_cases.h"
#include "cuda_twin.h"

namespace syncengine {

namespace {

using testing::Case, testing::expected, testing::operation_of, testing::run_ranks, testing::Tensors;
using testing::TwinGroup, testing::TwinSteps;

constexpr size_t kSlot = 640;  // bytes of half a staging buffer: small, so that a tensor takes several chunks

// A case with every rank's tensors.
struct Ranks {
  Ranks(const Case& c, int world) : c(c) {
    for (int rank = 0; rank < world; ++rank) tensors.emplace_back(c, rank, world).fill(c.dtype, 0);
    for (auto& mine : tensors) operations.push_back(operation_of(c, mine));
    route.path = c.path;
    if (c.path == Path::Direct)
      for (auto& operation : operations) route.memories.push_back(operation.input);
  }
  uint32_t mark(int rank) const { return cuda::fingerprint(operations[rank], c.path, 0); }
  void run(int rank, const TwinGroup& group, TwinSteps& steps) const {
    cuda::run_sequence(operations[rank], group.site(rank), route, mark(rank), steps);
  }
  // What the rank should have after a round that began with these values.
  std::vector<std::byte> expected_in(int round, int rank) const {
    const int world = static_cast<int>(tensors.size());
    std::vector<Tensors> before;
    for (int peer = 0; peer < world; ++peer) before.emplace_back(c, peer, world).fill(c.dtype, round);
    return expected(c, before, rank);
  }

  Case c;
  std::vector<Tensors> tensors;
  std::vector<Operation> operations;
  cuda::MemoryRoute route;
};

void run_case(const Case& c, int world) {
  TwinGroup group(world, kSlot, c.one_kernel);
  Ranks ranks(c, world);
  auto before = ranks.tensors;
  run_ranks(world, [&](int rank) {
    TwinSteps steps(rank, group.controls);
    ranks.run(rank, group, steps);
  });
  for (int rank = 0; rank < world; ++rank) {
    CHECK(ranks.tensors[rank].result() == expected(c, before, rank));
    CHECK(group.controls[rank]->mismatch[0] == 0 && group.controls[rank]->progress > 0);
  }
}

// With 5 ranks, sanitizers would see what they see with 3 and 8.
const auto kWorlds = testing::kSlowdown > 1 ? std::vector<int>{1, 2, 3, 8} : std::vector<int>{1, 2, 3, 5, 8};

void run_cases(Collective collective) {
  for (int world : kWorlds) {
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
// Scaled while they are staged, and not.
TEST(cuda_sequences_of_all_reduce_by_the_tree) {
  for (int world : kWorlds)
    for (Path path : {Path::Staged, Path::Direct})
      for (DType dtype : {DType::Float32, DType::BFloat16})
        for (size_t count : {1, 37, 150, 700})
          for (uint32_t extra : {0, 3}) {
            Case c{Collective::AllReduce, path, Numerics::Tree, dtype, count};
            c.leaves = static_cast<uint32_t>(world) + extra;
            run_case(c, world);
            c.prescale = 1.0 / 3;
            if (path == Path::Staged) run_case(c, world);
          }
}
// Blocks and slices are cut unevenly, and some are empty.
TEST(cuda_all_reduce_in_one_kernel) {
  for (int world : {1, 2, 3, 8})
    for (Path path : {Path::OneShot, Path::Staged})
      for (size_t count : {1, 5, 37, 150, 4000}) {
        Case c{.collective = Collective::AllReduce, .path = path, .count = count, .one_kernel = true};
        run_case(c, world);
        c.dtype = DType::BFloat16;
        run_case(c, world);
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

// A step of five collectives, captured once; eager calls before, between and after replays; ranks are late in turn.
TEST(cuda_graphs_replay_between_eager_calls) {
  constexpr int kWorld = 3;
  const int rounds = 300 / testing::kSlowdown;
  TwinGroup group(kWorld, kSlot, true);
  Ranks parts[] = {
      {{Collective::AllReduce, Path::Staged, Numerics::RankOrder, DType::Float32, 400}, kWorld},
      {{.collective = Collective::AllReduce, .path = Path::OneShot, .count = 30, .one_kernel = true}, kWorld},
      {{.collective = Collective::AllReduce, .path = Path::Staged, .count = 200, .one_kernel = true}, kWorld},
      {{Collective::AllReduce, Path::Direct, Numerics::RankOrder, DType::Float32, 100}, kWorld}};
  const Ranks barrier({Collective::Barrier, Path::Staged}, kWorld);
  run_ranks(kWorld, [&](int rank) {
    TwinSteps steps(rank, group.controls);
    auto all = [&](bool with_barrier) {
      for (const Ranks& part : parts) part.run(rank, group, steps);
      if (with_barrier) barrier.run(rank, group, steps);
    };
    steps.begin_capture();
    all(true);
    steps.end_capture();
    for (int round = 0; round < rounds; ++round) {
      for (Ranks& part : parts) part.tensors[rank].fill(DType::Float32, round);
      if (round % kWorld == rank) std::this_thread::sleep_for(std::chrono::microseconds(200));
      if (round % 5 == 3) {
        all(false);
      } else {
        steps.replay();
      }
      for (const Ranks& part : parts) CHECK(part.tensors[rank].input == part.expected_in(round, rank));
    }
  });
}

// The second of two ranks calls something else. Neither writes a sum, but all ones, which is NaN; and each knows whose
// call differs.
void check_mismatch(const Case& c, const std::function<void(Operation&)>& change) {
  TwinGroup group(2, kSlot, c.one_kernel);
  Ranks ranks(c, 2);
  change(ranks.operations[1]);
  run_ranks(2, [&](int rank) {
    TwinSteps steps(rank, group.controls);
    ranks.run(rank, group, steps);
    for (std::byte byte : ranks.tensors[rank].input) CHECK(byte == std::byte{0xff});
    CHECK_EQ(group.controls[rank]->mismatch[0], 2u - rank);
  });
}

TEST(cuda_mismatch_poisons_the_result) {
  check_mismatch({Collective::AllReduce, Path::OneShot, Numerics::RankOrder, DType::Float32, 10},
                 [](Operation& operation) { operation.op = ReduceOp::Max; });
  for (Path path : {Path::OneShot, Path::Staged})  // where a kernel waits
    check_mismatch({.collective = Collective::AllReduce, .path = path, .count = 300, .one_kernel = true},
                   [](Operation& operation) { operation.postscale = 0.5; });
}

// A peer stages its part and dies before it has reduced its slice. The abort ends the wait, nothing looks like a
// result, and calls behind that one write nothing that a peer may still read.
TEST(cuda_death_between_two_shots_poisons_all) {
  TwinGroup group(2, kSlot, true);
  Ranks ranks({.collective = Collective::AllReduce, .path = Path::Staged, .count = 300, .one_kernel = true}, 2);
  cuda::InKernelArea& own = *group.areas[0];
  for (auto& block : own.marks[1][0]) cuda::put_mark(&block[1], uint64_t{1} << 32 | ranks.mark(0));
  std::memset(own.slots[0], 7, sizeof(own.slots[0]));
  TwinSteps steps(0, group.controls);
  const std::jthread watchdog([&group] {
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
    cuda::store(group.controls[0]->aborted, 1);
  });
  for (int call = 0; call < 3; ++call) {
    ranks.run(0, group, steps);
    for (std::byte byte : ranks.tensors[0].input) CHECK(byte == std::byte{0xff});
  }
  CHECK_EQ(own.failed, 1u);
  for (int word = 0; word < 300; ++word) CHECK_EQ(own.slots[0][word * 4], 7);
}

// While it lives, and once 20 ms have passed since `begun`: stores `value` into all words that `owner` has of `peer`,
// again and again, for the stream makes them 0 after each wait.
std::jthread keep_storing(const TwinGroup& group, int owner, int peer, uint32_t value,
                          const uint32_t* begun = nullptr) {
  return std::jthread([=, &group](const std::stop_token& stop) {
    while (begun && cuda::load(*begun) == 0) std::this_thread::yield();
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
    while (!stop.stop_requested()) {
      for (auto& set : group.controls[owner]->inbox) cuda::store(set[peer], value);
      std::this_thread::yield();
    }
  });
}

// A peer never comes: releasing the words ends every wait that is left, and no result looks like one.
TEST(cuda_release_ends_all_waits_and_poisons) {
  TwinGroup group(2, kSlot);
  Ranks ranks({Collective::AllReduce, Path::Staged, Numerics::RankOrder, DType::Float32, 500}, 2);
  TwinSteps steps(0, group.controls);
  steps.orderly = false;
  {
    const auto watchdog = keep_storing(group, 0, 1, cuda::kReleased);
    // Words of the absent peer keep what was put there: it does not take them away.
    const auto absent = keep_storing(group, 1, 0, 0);
    for (int call = 0; call < 3; ++call) ranks.run(0, group, steps);
  }
  for (std::byte byte : ranks.tensors[0].input) CHECK(byte == std::byte{0xff});
}

// A peer dies after it has let this rank read its tensor, and before it has reduced its part: of what it owed nothing
// looks like a result.
TEST(cuda_death_between_exchanges_poisons_what_the_peer_owed) {
  TwinGroup group(2, kSlot);
  Ranks ranks({Collective::AllReduce, Path::Direct, Numerics::RankOrder, DType::Float32, 100}, 2);
  const auto result = ranks.expected_in(0, 0);
  cuda::store(group.controls[0]->inbox[0][1], ranks.mark(0));  // all that the peer still did
  TwinSteps steps(0, group.controls);
  steps.orderly = false;
  {
    const auto watchdog = keep_storing(group, 0, 1, cuda::kReleased, &group.controls[0]->progress);
    ranks.run(0, group, steps);  // the own part is reduced before the words are released
  }
  const auto& got = ranks.tensors[0].input;
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
