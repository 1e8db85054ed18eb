// Communicators over several hosts, with ranks as threads: the other collectives, buckets, groups, bytes sent. The bits
// of all-reduces are in hosts_bits_test.cpp.
#include <atomic>
#include <thread>

#include "engine/communicator/engine_communicator.h"
#include "engine/hosts/network.h"
#include "hosts_job.h"
#include "order_oracle.h"

namespace syncengine {

using testing::all_reduce_of, testing::check_all_reduce, testing::check_values, testing::contains, testing::fill;
using testing::kPlacements, testing::run_hosts, testing::sum_of_values;

namespace {

// What only the communicator itself knows: see [temp.explicit], which names private members.
hosts::InterhostMembers& interhost_of(EngineCommunicator& communicator);
template <const Members EngineCommunicator::* part>
struct InterhostOf {
  friend hosts::InterhostMembers& interhost_of(EngineCommunicator& communicator) {
    return *(communicator.*part).interhost;
  }
};
template struct InterhostOf<&EngineCommunicator::members_>;

}  // namespace

TEST(other_collectives_over_hosts) {
  for (Numerics numerics : {Numerics::RankOrder, Numerics::Fast}) {
    testing::run_on_each(kPlacements, {.numerics = numerics}, [&](int, Communicator& communicator) {
      for (size_t count : {size_t{0}, size_t{1}, size_t{3}, size_t{1000}, size_t{70001}}) {
        std::vector<float> part(count), whole(count * communicator.size());
        testing::check_collectives(communicator, part, whole);
        check_all_reduce(communicator, whole);
      }
    });
  }
}

TEST(a_barrier_over_hosts_waits_for_everybody) {
  for (const auto& hosts : kPlacements) {
    std::atomic<int> came{0};
    run_hosts(hosts, {}, [&](int rank, Communicator& communicator) {
      for (int round = 1; round <= 3; ++round) {
        if (rank == round % communicator.size()) std::this_thread::sleep_for(std::chrono::milliseconds(20));
        ++came;
        communicator.run(Operation{.collective = Collective::Barrier});
        CHECK(came >= round * communicator.size());
      }
    });
  }
}

// Payload that each host sent for one collective, by host.
std::vector<uint64_t> bytes_sent(const std::string& hosts, const Options& options, Operation operation, size_t count) {
  std::vector<uint64_t> sent(hosts.size());
  run_hosts(hosts, options, [&](int rank, Communicator& communicator) {
    size_t size = hosts.size(), element = element_size(operation.dtype);
    std::vector<float> in(count * size), out(count * size);
    Operation mine = operation;
    bool gathers = mine.collective == Collective::AllGather, scatters = mine.collective == Collective::ReduceScatter;
    mine.numerics = options.numerics;
    mine.input = SpanList(in.data(), count * element * (scatters ? size : 1));
    mine.output = gathers || scatters ? SpanList(out.data(), count * element * (gathers ? size : 1)) : mine.input;
    uint64_t before = communicator.counters().at("interhost_bytes");
    communicator.run(mine);
    sent[rank] = communicator.counters().at("interhost_bytes") - before;
  });
  std::vector<uint64_t> by_host(hosts.back() - 'a' + 1);
  for (size_t rank = 0; rank < hosts.size(); ++rank) by_host[hosts[rank] - 'a'] += sent[rank];
  return by_host;
}

TEST(no_byte_crosses_more_often_than_the_order_of_addition_needs) {
  constexpr size_t kCount = 240000 / testing::kSlowdown;
  struct Row {
    const char* hosts;
    Numerics numerics;
    DType dtype;
    std::vector<double> sent;  // by host, for each byte of the tensor
    HostAlgorithm algorithm = HostAlgorithm::Exchange;
  };
  constexpr auto kChain = HostAlgorithm::Chain;
  for (const Row& row :
       std::vector<Row>{{"ab", Numerics::RankOrder, DType::Float32, {1, 1}},  // 2 (n - 1) / n
                        {"abc", Numerics::RankOrder, DType::Float32, {4 / 3.0, 4 / 3.0, 4 / 3.0}},
                        {"abcd", Numerics::Ring, DType::Float32, {1.5, 1.5, 1.5, 1.5}},
                        {"aabb", Numerics::RankOrder, DType::Float32, {1, 1}, kChain},  // prefix there, result back
                        {"aabb", Numerics::RankOrder, DType::Float32, {1.5, 1.5}},
                        {"aabb", Numerics::RankOrder, DType::BFloat16, {1.5, 1.5}},  // raw: the prefix would be float32
                        {"aaaabbbb", Numerics::RankOrder, DType::BFloat16, {2, 1}, kChain},  // prefix in float32
                        {"aaab", Numerics::RankOrder, DType::Float32, {1, 1}, kChain},
                        {"aabbccdd", Numerics::RankOrder, DType::Float32, {1, 2, 2, 1}, kChain},
                        {"abab", Numerics::RankOrder, DType::Float32, {1.5, 1.5}},  // interleaved: raw
                        {"aabb", Numerics::Fast, DType::BFloat16, {1, 1}},
                        {"aabbccdd", Numerics::Fast, DType::Float32, {1.5, 1.5, 1.5, 1.5}}}) {
    auto sent = bytes_sent(row.hosts, {.numerics = row.numerics, .host_algorithm = row.algorithm}, {.dtype = row.dtype},
                           kCount);
    for (size_t host = 0; host < sent.size(); ++host) {
      double wanted = row.sent[host] * static_cast<double>(kCount * element_size(row.dtype));
      if (static_cast<double>(sent[host]) > 1.001 * wanted || static_cast<double>(sent[host]) < 0.95 * wanted)
        throw testing::Failure(std::string(row.hosts) + ": host " + std::to_string(host) + " sent " +
                               std::to_string(sent[host]) + " bytes, " + std::to_string(wanted) + " expected");
    }
  }
}

TEST(copies_cross_once_for_each_host) {
  constexpr size_t kCount = 60000;
  using Sent = std::vector<uint64_t>;
  auto bytes = [&](const char* hosts, Collective collective) {
    return bytes_sent(hosts, {.host_algorithm = HostAlgorithm::Chain}, {.collective = collective, .root = 1}, kCount);
  };
  constexpr uint64_t kBytes = kCount * sizeof(float);
  CHECK((bytes("aabb", Collective::AllGather) == Sent{2 * kBytes, 2 * kBytes}));
  CHECK((bytes("aaab", Collective::AllGather) == Sent{3 * kBytes, kBytes}));
  CHECK((bytes("aabbcc", Collective::Broadcast) == Sent{kBytes, kBytes, 0}));  // from host to host
  CHECK((bytes("ab", Collective::ReduceScatter) == Sent{kBytes, kBytes}));
}

// One host's end takes along what waits for it, and nothing is written into memory that its owner has back.
TEST(a_dead_peer_of_another_host_ends_every_wait) {
  testing::HostsJob job("aabb");
  job.run([&](int rank, Communicator& communicator) {
    std::vector<float> data(300000);
    if (rank == 3) {
      communicator.run(all_reduce_of(data));
      job.network().cut(3);
      std::this_thread::sleep_for(std::chrono::milliseconds(300));
      return;
    }
    auto run = [&] {
      for (int i = 0; i < 1000; ++i) communicator.run(all_reduce_of(data));
    };
    const auto text = CHECK_THROWS(run(), ErrorKind::PeerLost);
    CHECK(contains(text, "rank 3"));
  });
}

TEST(groups_within_and_across_hosts) {
  run_hosts("aabbc", {}, [](int rank, Communicator& communicator) {
    auto check = [](Communicator& group, const std::vector<int>& members) { check_all_reduce(group, 40000, members); };
    for (int round = 0; round < 3; ++round) {
      auto mine = [&](const std::vector<std::vector<int>>& groups) {
        for (const auto& members : groups)
          if (std::count(members.begin(), members.end(), rank)) return members;
        return std::vector<int>{};
      };
      for (const auto& members : {mine({{0, 1}, {2, 3}}), mine({{0, 2, 4}, {1, 3}}), mine({{3, 4}})}) {
        auto group = communicator.split(members);
        CHECK_EQ(group != nullptr, !members.empty());
        if (!group) continue;
        check(*group, members);
        if (members.size() == 3) {
          auto pair = group->split(rank == 2 ? std::vector<int>{} : std::vector<int>{0, 2});
          if (pair) check(*pair, {0, 4});
        }
        check(*group, members);
      }
      check(communicator, {0, 1, 2, 3, 4});
    }
    auto within = communicator.split(rank < 2 ? std::vector<int>{0, 1} : std::vector<int>{});
    if (!within) return;
    check(*within, {0, 1});
    CHECK_EQ(within->counters().at("interhost_bytes"), uint64_t{0});
  });
}

// Each of both threads is in the middle of its split while the other one's begins: rank 2, which is not among the
// members, is late.
TEST(groups_that_are_split_off_at_the_same_time_are_told_apart) {
  run_hosts("abc", {.timeout = seconds(20)}, [](int rank, Communicator& communicator) {
    auto second = communicator.split({0, 1, 2});
    if (rank == 2) std::this_thread::sleep_for(std::chrono::milliseconds(200));
    auto use = [rank](Communicator& parent, int shift) {
      auto pair = parent.split(rank == 2 ? std::vector<int>{} : std::vector<int>{0, 1});
      for (int round = 0; pair && round < 20; ++round) check_all_reduce(*pair, 70001, {0, 1}, shift);
    };
    testing::run_ranks(2, [&](int thread) { thread == 0 ? use(communicator, 0) : use(*second, 5); });
  });
}

// Any members, in any order of the threads: what is early for one rank is late for another.
TEST(threads_split_off_groups_of_any_members_over_hosts) {
  constexpr int kThreads = 3, kRounds = 12;
  run_hosts("aabcd", {.timeout = seconds(30), .arena_bytes = 512 << 20}, [](int rank, Communicator& communicator) {
    std::vector<std::shared_ptr<Communicator>> parents;
    for (int thread = 0; thread < kThreads; ++thread) parents.push_back(communicator.split({0, 1, 2, 3, 4}));
    testing::run_ranks(kThreads, [&](int thread) {
      std::mt19937 random(thread);  // the same on all ranks
      for (int round = 0; round < kRounds; ++round) {
        std::vector<int> members;
        for (int member = 0; member < 5; ++member)
          if (random() % 4 != 0) members.push_back(member);
        bool among = std::count(members.begin(), members.end(), rank) > 0;
        auto group = parents[thread]->split(among ? members : std::vector<int>{});
        if (group) check_all_reduce(*group, 3001, members, thread);
      }
    });
  });
}

// Nothing of the communicator that is refused touches that of the whole job, whose number is 0.
TEST(no_more_groups_over_hosts_than_there_are_numbers) {
  run_hosts("ab", {}, [](int rank, Communicator& communicator) {
    hosts::InterhostMembers& interhost = interhost_of(dynamic_cast<EngineCommunicator&>(communicator));
    for (int i = 1; rank == 0 && i < 1 << hosts::kCountBits; ++i) interhost.take_number();
    auto slots = communicator.reserve_slots(1);
    std::vector<float> data(size_t{8} << 20);
    fill(data, rank);
    auto work = communicator.announce(slots, 0, 1, all_reduce_of(data));
    const std::string text = CHECK_THROWS(communicator.split({0, 1}), ErrorKind::InvalidUsage);
    CHECK(contains(text, "too many communicators over several hosts"));
    communicator.wait(work);
    check_values(data, [&](size_t i) { return sum_of_values(2, i); });
  });
}

TEST(a_failed_group_leaves_other_groups_over_hosts_alone) {
  run_hosts("aabb", {}, [](int rank, Communicator& communicator) {
    auto pair = communicator.split(rank % 2 ? std::vector<int>{1, 3} : std::vector<int>{0, 2});
    std::vector<float> data(200000), other(10);
    for (int round = 0; round < 5; ++round) {
      fill(data, rank);
      auto work = communicator.submit(all_reduce_of(data));
      if (round == 2 && rank == 0) pair->abort(ErrorKind::Aborted, "enough");
      communicator.wait(work);
      check_values(data, [&](size_t i) { return sum_of_values(4, i); });
    }
    if (rank % 2 == 0) CHECK_THROWS(pair->run(all_reduce_of(other)), ErrorKind::Aborted);
  });
}

}  // namespace syncengine
