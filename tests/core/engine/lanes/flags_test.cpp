// A few bits that travel with an operation.
#include <cstdint>
#include <vector>

#include "collectives/operation.h"
#include "job.h"
#include "transport/shm/layout.h"

namespace syncengine {
namespace {

using testing::all_reduce_of;
using testing::run_job;

TEST(flags_travel_with_an_operation) {
  for (size_t words : {size_t{1}, size_t{3}, kMaxFlagWords}) {
    for (bool announced : {false, true}) {
      run_job(3, {}, [&](int rank, Communicator& communicator) {
        auto slots = communicator.reserve_slots(1);
        for (uint64_t round = 0; round < 2 * shm::kRecords; ++round) {  // records and their flags are used again
          std::vector<float> data(10, 1.0f);
          std::vector<uint64_t> flags(words, 0);
          flags[round % words] = uint64_t{1} << (rank + round % 60);
          flags[words - 1] |= uint64_t{1} << 63;
          Operation operation = all_reduce_of(data.data(), data.size() * 4, DType::Float32);
          operation.flags = flags.data();
          operation.flag_words = words;
          communicator.wait(announced ? communicator.announce(slots, 0, round + 1, operation)
                                      : communicator.submit(operation));
          std::vector<uint64_t> expected(words, 0);
          expected[round % words] = uint64_t{7} << round % 60;
          expected[words - 1] |= uint64_t{1} << 63;
          CHECK(flags == expected);
          CHECK_EQ(data[0], 3.0f);
        }
      });
    }
  }
}

TEST(flags_of_different_number_are_a_mismatch) {
  run_job(2, {}, [](int rank, Communicator& communicator) {
    float data = 1.0f;
    std::vector<uint64_t> flags(2);
    Operation operation = all_reduce_of(&data, 4, DType::Float32);
    operation.flags = flags.data();
    operation.flag_words = rank + 1;
    CHECK_THROWS(communicator.run(operation), ErrorKind::Mismatch);
  });
}

TEST(too_many_flags_are_refused) {
  run_job(2, {}, [](int, Communicator& communicator) {
    float data = 1.0f;
    std::vector<uint64_t> flags(kMaxFlagWords + 1);
    Operation operation = all_reduce_of(&data, 4, DType::Float32);
    operation.flags = flags.data();
    operation.flag_words = flags.size();
    CHECK_THROWS(communicator.run(operation), ErrorKind::InvalidUsage);
  });
}

}  // namespace
}  // namespace syncengine
