// Ranks as threads on several virtual hosts: each host's ranks share memory, hosts are connected by an Interhost.
#pragma once

#include <barrier>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "engine/job/local_bootstrap.h"
#include "fake_interhost.h"
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
          job.connect(addresses, Deadline::after(seconds(20)), {}, [&] { return network_->endpoint(rank); });
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

// What rank `rank` brings, small integers whose sums are exact, and the sum over `size` ranks.
inline float value(int rank, size_t i) { return static_cast<float>((i * 7 + static_cast<size_t>(rank) * 13) % 64); }

inline float sum_of_values(int size, size_t i) {
  float sum = 0;
  for (int rank = 0; rank < size; ++rank) sum += value(rank, i);
  return sum;
}

inline void fill(std::vector<float>& data, int rank) {
  for (size_t i = 0; i < data.size(); ++i) data[i] = value(rank, i);
}

template <class Expected>
void check_values(const std::vector<float>& data, Expected&& expected) {
  for (size_t i = 0; i < data.size(); ++i)
    if (data[i] != expected(i)) CHECK_EQ(data[i], expected(i));
}

}  // namespace syncengine::testing
