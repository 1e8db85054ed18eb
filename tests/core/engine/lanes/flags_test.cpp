// A few bits that travel with an operation.
#include <cstdint>
#include <vector>

#include "collectives/operation.h"
#include "hosts_job.h"
#include "transport/shm/layout.h"

namespace syncengine {
namespace {

using testing::all_reduce_of, testing::run_job;

Operation with_flags(float& data, std::vector<uint64_t>& flags) {
  Operation operation = all_reduce_of(&data, sizeof(data));
  operation.flags = flags.data();
  operation.flag_words = flags.size();
  return operation;
}

TEST(flags_travel_with_an_operation) {
  for (size_t words : {size_t{1}, size_t{3}, kMaxFlagWords}) {
    testing::run_on_each({"aaa", "ab", "aabb", "abbb"}, {}, [&](int rank, Communicator& communicator) {
      auto slots = communicator.reserve_slots(1);
      for (uint64_t round = 0; round < 2 * shm::kRecords; ++round) {  // records and their flags are used again
        float data = 1.0f;
        std::vector<uint64_t> flags(words), expected(words);
        flags[round % words] = uint64_t{1} << (rank + round % 59);
        flags[words - 1] |= uint64_t{1} << 63;
        expected[round % words] = ((uint64_t{1} << communicator.size()) - 1) << round % 59;
        expected[words - 1] |= uint64_t{1} << 63;
        const Operation operation = with_flags(data, flags);
        communicator.wait(round / 2 % 2 ? communicator.announce(slots, 0, round + 1, operation)
                                        : communicator.submit(operation));
        CHECK(flags == expected);
        CHECK_EQ(data, static_cast<float>(communicator.size()));
      }
    });
  }
}

TEST(flags_of_different_or_too_large_number_are_refused) {
  for (ErrorKind kind : {ErrorKind::Mismatch, ErrorKind::InvalidUsage})
    run_job(2, {}, [kind](int rank, Communicator& communicator) {
      float data = 1.0f;
      std::vector<uint64_t> flags(kind == ErrorKind::Mismatch ? size_t{1} + rank : kMaxFlagWords + 1);
      CHECK_THROWS(communicator.run(with_flags(data, flags)), kind);
    });
}

}  // namespace
}  // namespace syncengine
