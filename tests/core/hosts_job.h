// Ranks as threads on several virtual hosts: each host's ranks share memory, hosts are connected by an Interhost.
#pragma once

#include <barrier>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "engine/local_job.h"
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
      LocalJob job(rank, size(), options_, {}, std::string(1, hosts_[rank]));
      addresses[rank] = job.address();
      ready.arrive_and_wait();
      auto communicator =
          job.connect(addresses, Deadline::after(seconds(20)), {}, {}, [&] { return network_->endpoint(rank); });
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

}  // namespace syncengine::testing
