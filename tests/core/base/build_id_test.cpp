// Ranks of another build are refused by name, before a byte of theirs is believed.
#include "base/build_id.h"

#include <barrier>

#include "engine/job/local_bootstrap.h"
#include "test.h"

namespace syncengine {

using testing::contains;

TEST(ranks_of_different_builds_do_not_connect) {
  std::vector<std::string> addresses(2);
  std::barrier ready(2);
  testing::run_ranks(2, [&](int rank) {
    Options options;
    options.arena_bytes = 64 << 20;
    LocalBootstrap job(rank, 2, options);
    addresses[rank] = job.address();
    ready.arrive_and_wait();
    std::vector<std::string> seen = addresses;
    seen[1 - rank][8] ^= 1;  // behind the magic
    const auto text = CHECK_THROWS(job.connect(seen, Deadline::after(seconds(20))), ErrorKind::Mismatch);
    CHECK(contains(text, "rank " + std::to_string(1 - rank) + " runs another build of syncengine ("));
    CHECK(contains(text, build_text(build_id())) && contains(text, build_text(build_id() ^ 1)));
    CHECK_THROWS(job.hosts(seen), ErrorKind::Mismatch);
  });
}

}  // namespace syncengine
