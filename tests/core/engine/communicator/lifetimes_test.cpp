// How long engines live.
#include <barrier>

#include "fake_interhost.h"
#include "job.h"

namespace syncengine {

namespace {

using testing::run_ranks;

// Which the engine's own thread then drops, or that of the network.
void end_with_the_last_reference_in_flight(const std::string& hosts) {
  struct Holder {
    std::shared_ptr<Communicator> communicator;
    std::atomic<int>& dropped;
    ~Holder() {
      communicator.reset();
      ++dropped;
    }
  };
  std::atomic<int> dropped{0};
  const auto network = testing::FakeNetwork::create(2);
  std::vector<std::string> addresses(2);
  std::barrier ready(2);
  std::vector<float> data(2 * 1000);
  run_ranks(2, [&](int rank) {
    Options options;
    options.arena_bytes = 64 << 20;
    auto job = std::make_unique<LocalBootstrap>(rank, 2, options, CountCallers{}, std::string(1, hosts[rank]));
    addresses[rank] = job->address();
    ready.arrive_and_wait();
    auto communicator =
        job->connect(addresses, Deadline::after(std::chrono::seconds(60)), {}, [&] { return network->endpoint(rank); });
    ready.arrive_and_wait();
    job.reset();
    Operation operation = testing::all_reduce_of(data.data() + rank * 1000, 1000 * sizeof(float), DType::Float32);
    std::shared_ptr<void> holder(new Holder{communicator, dropped}, [](Holder* held) { delete held; });
    operation.keepalive = std::move(holder);
    communicator->submit(std::move(operation));
    communicator.reset();
    for (int tries = 0; dropped < 2 && tries < 2000; ++tries)
      std::this_thread::sleep_for(std::chrono::milliseconds(10));
  });
  CHECK_EQ(dropped.load(), 2);
}

}  // namespace

TEST(an_operation_may_hold_the_last_reference_to_its_engine) {
  end_with_the_last_reference_in_flight("aa");
  end_with_the_last_reference_in_flight("ab");
}

}  // namespace syncengine
