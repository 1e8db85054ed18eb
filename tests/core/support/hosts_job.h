// Ranks as threads on several virtual hosts: each host's ranks share memory, hosts are connected by an Interhost.
#pragma once

#include <barrier>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "engine/job/local_bootstrap.h"
#include "fake_interhost.h"
#include "job.h"
#include "test.h"

namespace syncengine::testing {

// Runs body(rank, communicator) on one rank for each letter of `hosts`; equal letters share a host.
class HostsJob {
 public:
  using Body = std::function<void(int, Communicator&)>;

  explicit HostsJob(std::string hosts, Options options = {})
      : hosts_(std::move(hosts)), options_(options), network_(FakeNetwork::create(size())) {
    if (options_.arena_bytes == 0) options_.arena_bytes = 64 << 20;
  }

  int size() const { return static_cast<int>(hosts_.size()); }
  FakeNetwork& network() { return *network_; }

  void run(const Body& body) {
    std::vector<std::string> addresses(size());
    std::barrier ready(size());
    run_ranks(size(), [&](int rank) {
      LocalBootstrap job(rank, size(), options_, {}, std::string(1, hosts_[rank]));
      addresses[rank] = job.address();
      ready.arrive_and_wait();
      auto communicator =
          job.connect(addresses, Deadline::after(seconds(60)), {}, [&] { return network_->endpoint(rank); });
      ready.arrive_and_wait();  // else what a quick rank does wrong ends the others' connect()
      body(rank, *communicator);
      communicator->close();
    });
  }

 private:
  std::string hosts_;
  Options options_;
  std::shared_ptr<FakeNetwork> network_;
};

inline void run_hosts(const std::string& hosts, const Options& options, const HostsJob::Body& body) {
  HostsJob(hosts, options).run(body);
}

// Runs body on the ranks of each placement, one placement after the other.
inline void run_on_each(const std::vector<std::string>& placements, const Options& options,
                        const HostsJob::Body& body) {
  for (const auto& hosts : placements) run_hosts(hosts, options, body);
}

// The same four ranks: on one host each, two and two, three and one, and so that neighbors never share a host.
inline const std::vector<std::string> kPlacements =
    kSlowdown > 1 ? std::vector<std::string>{"ab", "aabb", "aaab", "abab"}
                  : std::vector<std::string>{"ab",   "abc",  "aab",  "abcd",     "aabb",    "aaab",
                                             "abbb", "abab", "abba", "aaaabbbb", "aabbccdd"};

// What rank `rank` brings, small integers whose sums are exact, and the sum over `size` ranks.
inline float value(int rank, size_t i) { return static_cast<float>((i * 7 + static_cast<size_t>(rank) * 13) % 64); }

inline float sum_of_values(int size, size_t i) {
  float sum = 0;
  for (int rank = 0; rank < size; ++rank) sum += value(rank, i);
  return sum;
}

inline void fill(std::span<float> data, int rank, size_t from = 0) {
  for (size_t i = 0; i < data.size(); ++i) data[i] = value(rank, from + i);
}

template <class Expected>
void check_values(std::span<const float> data, Expected&& expected) {
  for (size_t i = 0; i < data.size(); ++i)
    if (data[i] != expected(i)) CHECK_EQ(data[i], expected(i));  // the slow check only to say so
}

inline void check_all_reduce(Communicator& communicator, std::span<float> data) {
  fill(data, communicator.rank());
  Operation operation = all_reduce_of(data.data(), data.size_bytes());
  operation.numerics = communicator.numerics();
  communicator.run(operation);
  check_values(data, [&](size_t i) { return sum_of_values(communicator.size(), i); });
}

// In a group of which these are the `members`.
inline void check_all_reduce(Communicator& group, size_t count, const std::vector<int>& members, int shift = 0) {
  std::vector<float> data(count);
  fill(data, members[group.rank()] + shift);
  group.run(all_reduce_of(data));
  check_values(data, [&](size_t i) {
    float sum = 0;
    for (int member : members) sum += value(member + shift, i);
    return sum;
  });
}

// The other collectives: of each rank's elements, with room for those of all ranks.
inline void check_collectives(Communicator& communicator, std::span<float> part, std::span<float> whole) {
  const int rank = communicator.rank(), size = communicator.size();
  const size_t count = part.size();
  auto run = [&](Collective collective, std::span<float> input, std::span<float> output, int root = kNoRoot) {
    fill(input, rank);
    communicator.run({.collective = collective,
                      .numerics = communicator.numerics(),
                      .root = root,
                      .input = {input.data(), input.size_bytes()},
                      .output = {output.data(), output.size_bytes()}});
  };
  for (int root : {0, size - 1}) {
    run(Collective::Broadcast, part, part, root);
    check_values(part, [&](size_t i) { return value(root, i); });
  }
  run(Collective::AllGather, part, whole);
  check_values(whole, [&](size_t i) { return value(static_cast<int>(i / count), i % count); });
  run(Collective::ReduceScatter, whole, part);
  check_values(part, [&](size_t i) { return sum_of_values(size, rank * count + i); });
  run(Collective::Barrier, {}, {});
}

}  // namespace syncengine::testing
