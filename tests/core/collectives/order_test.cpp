// The bits of a sum: in which order contributions are added, and that nothing else has a say. Whole collectives through
// the engine against an oracle that shares no code with it.
#include "collectives/order.h"
#include "order_oracle.h"

namespace syncengine {

using testing::Bytes, testing::Case, testing::check_bits, testing::contributions, testing::oracle, testing::run_job;
using testing::Wanted;

namespace {

constexpr Algorithm kAlgorithms[] = {Algorithm::Auto, Algorithm::Direct, Algorithm::Staged, Algorithm::OneShot};
constexpr Numerics kNumerics[] = {Numerics::RankOrder, Numerics::Ring};

void check_with_every_algorithm(int world, const std::vector<Case>& cases) {
  for (Numerics numerics : kNumerics) {
    const Wanted wanted(cases, numerics, world);
    for (Algorithm algorithm : kAlgorithms)
      run_job(world, {.numerics = numerics, .algorithm = algorithm},
              [&](int, Communicator& communicator) { wanted.check_everywhere(communicator); });
  }
}

}  // namespace

TEST(ring_cut_and_order_are_gloos) {
  for (int world = 1; world <= 9; ++world) {
    for (size_t element : {1, 2, 4, 8}) {
      for (size_t count : {1, 2, 3, 17, 18, 19, 100, 1000, 4097, 262143, 262144, 262145, 1310719, 1310721, 6553600}) {
        const size_t bytes = count * element;
        const RingCut cut = ring_cut(bytes, element, world);
        CHECK(cut.chunk > 0 && cut.chunk % element == 0);
        std::vector<int> order;
        for (const auto& segment : testing::gloo_ring(bytes, element, static_cast<size_t>(world))) {
          ring_order(cut.chunk_of(segment.begin), world, order);
          CHECK(order == segment.order);
          CHECK_EQ(cut.chunk_of(segment.end - element), cut.chunk_of(segment.begin));
        }
      }
    }
  }
}

TEST(a_cut_tree_adds_what_the_whole_one_does) {
  auto whole = [](auto& self, uint32_t begin, uint32_t end) -> std::string {
    if (end - begin == 1) return std::to_string(begin);
    const uint32_t between = testing::middle(begin, end);
    return "(" + self(self, begin, between) + "+" + self(self, between, end) + ")";
  };
  std::vector<uint32_t> numbers{127, 128, 129, 255, 257, 1000, 1023, 4097};
  for (uint32_t leaves = 1; leaves <= 70; ++leaves) numbers.push_back(leaves);
  for (uint32_t leaves : numbers) {
    for (int ranks = 1; ranks <= 64 && static_cast<uint32_t>(ranks) <= leaves; ++ranks) {
      const TreeCut cut = cut_tree(leaves, ranks);
      std::vector<std::string> stack;
      for (int rank = 0; rank < ranks; ++rank) {
        CHECK(testing::nodes_of_ranks(leaves, ranks).at(cut.begins[rank]) == cut.begins[rank + 1]);
        stack.push_back(whole(whole, cut.begins[rank], cut.begins[rank + 1]));
        CHECK(stack.size() <= kernels::kMaxTreeDepth + 1);
        for (int merge = 0; merge < cut.merges[rank]; ++merge) {
          const std::string right = stack.back();
          stack.pop_back();
          stack.back() = "(" + stack.back() + "+" + right + ")";
        }
      }
      CHECK_EQ(stack.size(), size_t{1});
      CHECK(stack[0] == whole(whole, 0, leaves));
    }
  }
  CHECK_THROWS(cut_tree(3, 4), ErrorKind::InvalidUsage);
}

TEST(bits_of_a_tree) {
  const bool quick = testing::kSlowdown > 1;
  for (int world : quick ? std::vector<int>{2, 5} : std::vector<int>{2, 3, 4, 5, 8}) {
    std::vector<Case> cases;
    for (DType dtype : {DType::Float32, DType::Float64, DType::BFloat16, DType::Float16})
      for (uint32_t leaves : {8u, 11u})
        for (size_t count : {size_t{1}, size_t{1003}, size_t{40001}})
          cases.push_back({dtype, ReduceOp::Avg, count, 1.0, 1.0 / leaves, leaves});
    const Wanted wanted(cases, Numerics::Tree, world);
    for (Algorithm algorithm : kAlgorithms)
      run_job(world, {.algorithm = algorithm},
              [&](int, Communicator& communicator) { wanted.check_everywhere(communicator); });
  }
}

TEST(bits_depend_on_the_order_alone) {
  constexpr size_t kChunk = shm::kSlotBytes;
  const bool quick = testing::kSlowdown > 1;  // memory errors and races show with few ranks; the oracle is slow
  for (int world : quick ? std::vector<int>{2, 3} : std::vector<int>{2, 3, 4, 5, 8}) {
    std::vector<Case> cases;
    for (DType dtype : {DType::Float32, DType::BFloat16, DType::Float16}) {
      const size_t chunk = kChunk / element_size(dtype);
      for (size_t count : {size_t{1}, size_t{2} * world + 1, size_t{1001}})
        cases.push_back({dtype, ReduceOp::Sum, count, 1.0, 1.0 / world});
      if (world == 3 && !(quick && dtype != DType::Float32)) {
        for (size_t count : {chunk - 1, chunk, chunk + 1})
          cases.push_back({dtype, ReduceOp::Sum, count, 1.0, 1.0 / world});
      }
      cases.push_back({dtype, ReduceOp::Sum, 5003, 1.0 / world, 1.0});  // scaled first, as DDP does
    }
    check_with_every_algorithm(world, cases);
  }
}

// The oracle must be able to tell: were the sums exact, the test above would pass in any order.
TEST(bits_of_the_two_orders_differ) {
  for (DType dtype : {DType::Float32, DType::BFloat16, DType::Float16}) {
    const Case what{dtype, ReduceOp::Sum, 1001};
    const std::vector<Bytes> brought = contributions(what, 3);
    const Bytes a = oracle(what, Numerics::RankOrder, brought), b = oracle(what, Numerics::Ring, brought);
    size_t different = 0;
    for (size_t i = 0; i < a.size(); i += element_size(dtype))
      different += std::memcmp(&a[i], &b[i], element_size(dtype)) != 0;
    CHECK(different > 50);
  }
}

TEST(every_dtype_and_op) {
  std::vector<Case> cases;
  for (int dtype = 0; dtype <= static_cast<int>(DType::Bool); ++dtype)
    for (int op = 0; op <= static_cast<int>(ReduceOp::Max); ++op) {
      Case what{static_cast<DType>(dtype), static_cast<ReduceOp>(op), 613};
      if (!is_supported(what.dtype, what.op)) continue;
      if (what.op == ReduceOp::Avg) what.postscale = 1.0 / 3;
      cases.push_back(what);
    }
  CHECK_EQ(cases.size(), size_t{4 * 5 + 5 * 4 + 3});
  check_with_every_algorithm(3, cases);
}

// Part p is summed in rank order, or as the ring's chunk p.
TEST(reduce_scatter_adds_in_the_same_order) {
  constexpr int kWorld = 3;
  constexpr size_t kCount = 30001;  // of a part: more than a chunk
  for (DType dtype : {DType::Float32, DType::BFloat16}) {
    const Case whole{dtype, ReduceOp::Sum, kWorld * kCount};
    const size_t bytes = kCount * element_size(dtype);
    std::vector<Bytes> inputs = contributions(whole, kWorld);
    for (Numerics numerics : kNumerics) {
      for (Algorithm algorithm : kAlgorithms) {
        run_job(kWorld, {.numerics = numerics, .algorithm = algorithm}, [&](int rank, Communicator& communicator) {
          const bool ring = numerics == Numerics::Ring;
          std::vector<const void*> sources;
          for (int hop = 0; hop < kWorld; ++hop)
            sources.push_back(inputs[ring ? (rank - 1 - hop + 2 * kWorld) % kWorld : hop].data() + rank * bytes);
          const Bytes wanted = testing::expected(
              {dtype, ReduceOp::Sum, ring ? kernels::Rounding::EveryHop : kernels::Rounding::Once, 1.0}, sources,
              kCount);
          auto shared = communicator.allocate(kWorld * bytes);
          std::memcpy(shared.get(), inputs[rank].data(), kWorld * bytes);
          for (void* input : {static_cast<void*>(inputs[rank].data()), shared.get()}) {
            Bytes output(bytes);
            communicator.run({.collective = Collective::ReduceScatter,
                              .dtype = dtype,
                              .numerics = numerics,
                              .input = {input, kWorld * bytes},
                              .output = {output.data(), bytes}});
            check_bits({dtype, ReduceOp::Sum, kCount}, output, wanted, "reduce_scatter");
          }
        });
      }
    }
  }
}

}  // namespace syncengine
