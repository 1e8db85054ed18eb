// Memory that ranks have in common: what they say about updates of it, and who sees which bytes.
#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <atomic>
#include <cstring>
#include <thread>
#include <vector>

#include "base/memory.h"
#include "child.h"
#include "shm_memory.h"
#include "test.h"
#include "transport/shm/region.h"

namespace syncengine::testing {

using shm::Region;

namespace {

std::shared_ptr<Region> again(const Region& region) { return Region::open(UniqueFd(dup(region.fd()))); }

char* chars(const Region& region, size_t offset = 0) { return reinterpret_cast<char*>(region.at(offset, 1)); }

}  // namespace

TEST(ranks_see_each_others_bytes) {
  auto made = Region::create(3 * kMiB), opened = again(*made);
  CHECK_EQ(opened->bytes(), made->bytes());
  std::memset(chars(*made), 5, 3 * kMiB);
  CHECK(all_are(chars(*opened), 3 * kMiB, 5));
  made.reset();
  CHECK(all_are(chars(*opened), 3 * kMiB, 5));
}

TEST(what_is_no_region_is_refused) {
  CHECK_THROWS(Region::open(UniqueFd(open("/dev/null", O_RDWR))), ErrorKind::InvalidUsage);
  CHECK_THROWS(Region::open(create_sealed_memfd("syncengine", 5 * kMiB)), ErrorKind::InvalidUsage);
  CHECK_THROWS(Region::open(UniqueFd(memfd_create("syncengine", MFD_CLOEXEC))), ErrorKind::InvalidUsage);
  auto region = Region::create(kMiB);
  CHECK_THROWS(region->at(region->bytes() - 1, 2), ErrorKind::InvalidUsage);
  CHECK_THROWS(region->at(~size_t{0}, 2), ErrorKind::InvalidUsage);
  CHECK_THROWS(Region::create(size_t{1} << 60), ErrorKind::InvalidUsage);
}

TEST(the_first_decision_holds_for_all) {
  auto region = Region::create(0), other = again(*region);
  CHECK(region->decide(1, true));
  CHECK(other->decide(1, false));
  CHECK(!other->decide(2, false));
  CHECK(!region->decide(2, true));
  CHECK(region->decide(5, true));
  CHECK(other->decide(5, true));
}

TEST(racing_ranks_get_one_decision) {
  auto region = Region::create(0);
  for (uint64_t number = 1; number <= 2000 / kSlowdown; ++number) {
    std::atomic<int> ready = 0;
    std::vector<int> decisions(3);
    run_ranks(3, [&](int rank) {
      ready.fetch_add(1);
      while (ready.load() < 3) std::this_thread::yield();
      decisions[rank] = region->decide(number, rank != 1);
    });
    CHECK(decisions[0] == decisions[1] && decisions[1] == decisions[2]);
  }
}

TEST(each_rank_says_what_it_has_completed_and_the_first_tear_stays) {
  auto region = Region::create(0), other = again(*region);
  region->complete(0, 4);
  other->complete(2, 3);
  CHECK(region->completed(3) == (std::vector<uint64_t>{4, 0, 3}));
  CHECK_EQ(other->torn(), uint64_t{0});
  other->tear(4);
  region->tear(5);
  CHECK_EQ(region->torn(), uint64_t{4});
}

TEST(a_detached_region_is_this_ranks_own_at_the_same_address) {
  auto region = Region::create(64 * kMiB), other = again(*region);
  std::memset(chars(*region, 20 * kMiB), 3, kMiB);
  char* const address = chars(*region, 20 * kMiB);
  CHECK(is_mapped_shared(address));
  const long before = memory_of_process("Anonymous");
  CHECK(region->detach());
  CHECK(region->detach());
  CHECK(!region->is_shared() && !is_mapped_shared(address));
  if (kCountsBytes) CHECK(memory_of_process("Anonymous") - before < static_cast<long>(4 * kMiB));
  CHECK(all_are(address, kMiB, 3));
  *address = 9;
  *chars(*other, 20 * kMiB + 1) = 8;
  CHECK_EQ(int{*chars(*other, 20 * kMiB)}, 3);
  CHECK_EQ(int{address[1]}, 3);
}

TEST(a_child_reads_what_is_there_and_writes_for_itself) {
  auto region = Region::create(32 * kMiB), detached = Region::create(kMiB);
  std::memset(chars(*region), 1, 32 * kMiB);
  std::memset(chars(*detached), 6, kMiB);
  CHECK(detached->detach());
  const long before = memory_of_process("Anonymous");
  CHECK(true_in_child([&] {
    const long grown = memory_of_process("Anonymous") - before;
    const bool copied = kCountsBytes && grown > static_cast<long>(2 * kMiB);
    if (copied) std::fprintf(stderr, "a child: %ld bytes more\n", grown);
    const bool reads = all_are(chars(*region), 32 * kMiB, 1) && all_are(chars(*detached), kMiB, 6);
    std::memset(chars(*region), 2, kMiB);
    region->tear(1);
    return !copied && reads && all_are(chars(*region), kMiB, 2) && !region->is_shared();
  }));
  CHECK(all_are(chars(*region), 32 * kMiB, 1));
  CHECK_EQ(region->torn(), uint64_t{0});
}

}  // namespace syncengine::testing
