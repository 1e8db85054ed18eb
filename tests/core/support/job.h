// Ranks as threads of one process, connected as processes are: through sockets, memfds and mappings.
#pragma once

#include <algorithm>
#include <barrier>
#include <cstring>
#include <functional>
#include <memory>
#include <numeric>
#include <vector>

#include "engine/job/local_bootstrap.h"
#include "test.h"

namespace syncengine::testing {

// Runs body(rank, communicator) on `size` ranks. A body that ends leaves its communicator. `count_callers`: see Engine.
inline void run_job(int size, const syncengine::Options& options, const std::function<void(int, Communicator&)>& body,
                    const CountCallers& count_callers = {}) {
  std::vector<std::string> addresses(size);
  std::barrier ready(size);
  run_ranks(size, [&](int rank) {
    syncengine::Options mine = options;
    if (mine.arena_bytes == 0) mine.arena_bytes = 256 << 20;
    LocalBootstrap job(rank, size, mine, count_callers);
    addresses[rank] = job.address();
    ready.arrive_and_wait();
    auto communicator = job.connect(addresses, Deadline::after(seconds(60)));
    body(rank, *communicator);
    communicator->close();
  });
}

// Blocks until another rank's error has reached this one, which calls nothing meanwhile.
inline void wait_for_failure(Communicator& communicator) {
  try {
    while (true) {
      communicator.check_peers();
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
  } catch (const Error&) {
  }
}

inline Operation all_reduce_of(void* data, size_t bytes, DType dtype = DType::Float32, ReduceOp op = ReduceOp::Sum) {
  Operation operation{};
  operation.dtype = dtype;
  operation.op = op;
  operation.input = operation.output = SpanList(data, bytes);
  return operation;
}
inline Operation all_reduce_of(std::vector<float>& data) {
  return all_reduce_of(data.data(), data.size() * sizeof(float));
}

// The numbers below `count` in some order.
template <class Random>
std::vector<size_t> shuffled(size_t count, Random& random) {
  std::vector<size_t> order(count);
  std::iota(order.begin(), order.end(), 0);
  std::shuffle(order.begin(), order.end(), random);
  return order;
}

}  // namespace syncengine::testing
