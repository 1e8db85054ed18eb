// How long engines live.
#include <barrier>

#include "fake_interhost.h"
#include "job.h"

namespace syncengine {

// The engine's own thread then drops that reference, or the network's thread.
TEST(an_operation_may_hold_the_last_reference_to_its_engine) {
  struct Holder {
    std::shared_ptr<Communicator> communicator;
    std::atomic<int>& dropped;
    ~Holder() {
      communicator.reset();
      ++dropped;
    }
  };
  for (std::string hosts : {"aa", "ab"}) {
    std::atomic<int> dropped{0};
    const auto network = testing::FakeNetwork::create(2);
    std::vector<std::string> addresses(2);
    std::barrier ready(2);
    std::vector<float> data(2 * 1000);
    testing::run_ranks(2, [&](int rank) {
      auto job = std::make_unique<LocalBootstrap>(rank, 2, Options{.arena_bytes = 64 << 20}, CountCallers{},
                                                  std::string(1, hosts[rank]));
      addresses[rank] = job->address();
      ready.arrive_and_wait();
      auto communicator =
          job->connect(addresses, Deadline::after(seconds(60)), {}, [&] { return network->endpoint(rank); });
      ready.arrive_and_wait();
      job.reset();
      Operation operation = testing::all_reduce_of(data.data() + rank * 1000, 1000 * sizeof(float), DType::Float32);
      operation.keepalive = std::shared_ptr<Holder>(new Holder{communicator, dropped});
      communicator->submit(std::move(operation));
      communicator.reset();
      for (int tries = 0; dropped < 2 && tries < 2000; ++tries)
        std::this_thread::sleep_for(std::chrono::milliseconds(10));
    });
    CHECK_EQ(dropped.load(), 2);
  }
}

}  // namespace syncengine
