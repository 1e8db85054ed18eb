#include <cerrno>
#include <cstring>

#include "base/deadline.h"
#include "base/dtype.h"
#include "collectives/spans.h"
#include "test.h"

namespace syncengine {
namespace {

TEST(deadline_passes_and_never_promises_negative_time) {
  Deadline deadline = Deadline::after(seconds(-1));
  CHECK(deadline.passed());
  CHECK(deadline.left(seconds(5)) == Duration::zero());
}

TEST(deadline_left_is_cut_to_the_slice) {
  CHECK(!Deadline::never().passed());
  CHECK(Deadline::never().left(seconds(2)) == seconds(2));
  CHECK(Deadline::after(seconds(1)).left(seconds(60)) <= seconds(1));
}

TEST(average_needs_a_floating_dtype_and_bool_has_no_sum) {
  CHECK(is_supported(DType::Float16, ReduceOp::Avg));
  CHECK(is_supported(DType::Float64, ReduceOp::Avg));
  CHECK(!is_supported(DType::Int8, ReduceOp::Avg));
  CHECK(!is_supported(DType::Bool, ReduceOp::Avg));
  CHECK(!is_supported(DType::Bool, ReduceOp::Sum));
  CHECK(is_supported(DType::Bool, ReduceOp::Max));
}

TEST(system_error_says_what_failed_and_why) {
  auto text_of = [](int code, const char* call) {
    return CHECK_THROWS(throw_system_error("opening the arena", code, call), ErrorKind::InvalidUsage);
  };
  CHECK_EQ(text_of(EIO, "open"), std::string("opening the arena: ") + std::strerror(EIO));
  CHECK(testing::contains(text_of(EMFILE, "open"), "(ulimit -n is "));
  CHECK(testing::contains(text_of(EPERM, "open"), ": allow open there"));
}

// Every range of a span list over pieces of 3, 0, 1 and 4 bytes visits exactly its bytes, in order.
TEST(spans_visit_each_byte_of_each_range_once) {
  char memory[] = "abc.d.efgh";
  SpanList spans;
  spans.add(memory, 3);
  spans.add(memory + 3, 0);
  spans.add(memory + 4, 1);
  spans.add(memory + 6, 4);
  const std::string whole = "abcdefgh";
  CHECK_EQ(spans.bytes(), whole.size());
  for (size_t begin = 0; begin <= whole.size(); ++begin) {
    for (size_t end = begin; end <= whole.size(); ++end) {
      std::string seen;
      spans.for_each(begin, end - begin, [&](std::byte* data, size_t offset, size_t bytes) {
        CHECK_EQ(offset, seen.size());
        seen.append(reinterpret_cast<char*>(data), bytes);
      });
      CHECK_EQ(seen, whole.substr(begin, end - begin));
    }
  }
}

void fail_on_rank_one(int rank) {
  if (rank == 1) throw Error(ErrorKind::PeerLost, "rank 1");
}

TEST(failure_on_one_rank_is_rethrown) { CHECK_THROWS(testing::run_ranks(3, fail_on_rank_one), ErrorKind::PeerLost); }

}  // namespace
}  // namespace syncengine
