// The bits of all-reduces over several hosts, with ranks as threads: they do not depend on the placement or the way.
#include <string>
#include <vector>

#include "hosts_job.h"
#include "order_oracle.h"
#include "transport/interhost.h"

namespace syncengine {

using testing::Bytes, testing::Case, testing::kPlacements, testing::run_hosts, testing::Wanted;

TEST(bits_do_not_depend_on_the_placement_or_the_way_between_hosts) {
  for (const auto& hosts : kPlacements) {
    int world = static_cast<int>(hosts.size());
    std::vector<Case> cases;
    for (DType dtype : {DType::Float32, DType::BFloat16, DType::Float16}) {
      for (size_t count : {size_t{1}, size_t{1001}, size_t{150001}})
        cases.push_back({dtype, ReduceOp::Sum, count, 1.0, 1.0 / world});
      cases.push_back({dtype, ReduceOp::Sum, 70003, 1.0 / world, 1.0});  // scaled first, as DDP does
    }
    cases.push_back({DType::Int64, ReduceOp::Max, 613});
    cases.push_back({DType::Float64, ReduceOp::Product, 613});
    cases.push_back({DType::Bool, ReduceOp::Min, 613});
    for (Numerics numerics : {Numerics::RankOrder, Numerics::Ring}) {
      const Wanted wanted(cases, numerics, world);
      for (auto way : {HostAlgorithm::Exchange, HostAlgorithm::Chain}) {
        run_hosts(hosts, {.numerics = numerics, .host_algorithm = way},
                  [&](int, Communicator& communicator) { wanted.check_everywhere(communicator); });
        if (numerics == Numerics::Ring) break;  // it knows no chain
      }
    }
  }
}

TEST(bits_of_a_tree_do_not_depend_on_the_placement) {
  for (const auto& hosts : kPlacements) {
    int world = static_cast<int>(hosts.size());
    std::vector<Case> cases;
    for (DType dtype : {DType::Float32, DType::BFloat16})
      for (uint32_t leaves : {static_cast<uint32_t>(world), 16u})
        for (size_t count : {size_t{1}, size_t{150001}})
          cases.push_back({dtype, ReduceOp::Avg, count, 1.0, 1.0 / leaves, leaves});
    const Wanted wanted(cases, Numerics::Tree, world);
    run_hosts(hosts, {}, [&](int, Communicator& communicator) { wanted.check_everywhere(communicator); });
  }
}

// Around the largest transfer, which a running sum in float32 reaches with half as many bytes. With one rank a host
// there is one sum a host, so all numerics but `ring` give the bits of rank_order. What is not the chain of rank_order
// gets three cases.
static void check_large_tensors(const char* hosts) {
  constexpr size_t kMost = Interhost::kMaxTransfer;
  const std::vector<std::pair<Numerics, HostAlgorithm>> ways{{Numerics::RankOrder, HostAlgorithm::Chain},
                                                             {Numerics::RankOrder, HostAlgorithm::Exchange},
                                                             {Numerics::RankOrder, HostAlgorithm::Auto},
                                                             {Numerics::Fast, HostAlgorithm::Chain},
                                                             {Numerics::Ring, HostAlgorithm::Chain}};
  int world = static_cast<int>(std::string(hosts).size());
  std::vector<Case> all{{DType::BFloat16, ReduceOp::Sum, kMost / 2 + 33, 1.0, 1.0 / world},
                        {DType::BFloat16, ReduceOp::Sum, kMost / 2, 1.0 / world, 1.0},
                        {DType::Float16, ReduceOp::Max, kMost / 2}};
  for (size_t bytes : {kMost / 2, kMost / 2 + 64, kMost - 2, kMost, kMost + 2})
    all.push_back({DType::Float16, ReduceOp::Sum, bytes / 2});
  for (DType dtype : {DType::Float32, DType::Float64, DType::Int8})
    all.push_back({dtype, ReduceOp::Sum, kMost / element_size(dtype)});
  for (auto [numerics, way] : ways) {
    const bool first = numerics == Numerics::RankOrder && way == HostAlgorithm::Chain;
    const std::vector<Case> cases(all.begin(), first ? all.end() : all.begin() + 3);
    const Wanted wanted(cases, numerics, world);
    const Options options{.numerics = numerics, .host_algorithm = way, .timeout = seconds(60)};
    run_hosts(hosts, options, [&](int rank, Communicator& communicator) {
      for (size_t i = 0; i < cases.size(); ++i) {
        Bytes data = wanted.brought[i][rank];
        testing::run_case(communicator, cases[i], {data.data(), data.size()});
        testing::check_bits(cases[i], data, wanted.bytes[i], hosts);
      }
    });
  }
}

TEST(large_tensors_of_three_ranks_that_are_alone_on_their_hosts) { check_large_tensors("abc"); }
TEST(large_tensors_of_four_ranks_that_are_alone_on_their_hosts) { check_large_tensors("abcd"); }

}  // namespace syncengine
