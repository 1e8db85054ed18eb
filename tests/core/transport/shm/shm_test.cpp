// Shared memory by itself: arenas and their seals, the heap, severing, fork, and signs of life.
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <barrier>
#include <cstdlib>
#include <cstring>
#include <random>
#include <string>
#include <thread>

#include "base/build_id.h"
#include "child.h"
#include "shm_memory.h"
#include "transport/shm/arena.h"

namespace syncengine::testing {

namespace {

constexpr size_t kArena = 16 << 20;
constexpr int kSeals = F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL;

// The same memory as a peer sees it.
std::unique_ptr<shm::PeerArena> peer_of(const shm::Arena& arena) {
  return std::make_unique<shm::PeerArena>(arena.fd(), arena.bytes());
}

// A memfd as a peer might send it, with a sound header unless told otherwise.
UniqueFd memfd(size_t bytes, int seals, uint64_t magic = build_id()) {
  UniqueFd fd(memfd_create("test", MFD_CLOEXEC | MFD_ALLOW_SEALING));
  CHECK(ftruncate(fd.get(), static_cast<off_t>(bytes)) == 0);
  CHECK(pwrite(fd.get(), &magic, sizeof(magic), 0) == sizeof(magic));
  CHECK(fcntl(fd.get(), F_ADD_SEALS, seals) == 0);
  return fd;
}

}  // namespace

TEST(arena_is_sealed_against_resizing) {
  auto arena = shm::Arena::create(kArena);
  CHECK_EQ(fcntl(arena->fd(), F_GET_SEALS) & kSeals, kSeals);
  CHECK(ftruncate(arena->fd(), 4096) != 0);
  CHECK(ftruncate(arena->fd(), 2 * kArena) != 0);
  CHECK(fcntl(arena->fd(), F_GETFD) & FD_CLOEXEC);
  CHECK(is_mapped_shared(arena->at(0)));
}

TEST(arena_takes_no_memory_before_it_is_touched) {
  auto arena = shm::Arena::create(kArena);
  auto tensor = arena->allocate_tensor(4 << 20);
  CHECK(pages_of(*arena) < 4 * shm::kPage + (64 << 10));
  std::memset(tensor.get(), 1, 4 << 20);
  CHECK(pages_of(*arena) >= 4 << 20);
  tensor.reset();  // and gives it back
  CHECK(pages_of(*arena) < 4 * shm::kPage + (64 << 10));
}

TEST(arena_knows_its_memory) {
  auto arena = shm::Arena::create(kArena);
  auto tensor = arena->allocate_tensor(1000);
  int64_t offset = arena->offset_of(tensor.get(), 1000);
  CHECK(offset > 0 && offset % static_cast<int64_t>(shm::kPage) == 0);
  CHECK_EQ(arena->offset_of(chars(tensor) + 17, 10), offset + 17);
  CHECK(arena->at(static_cast<size_t>(offset)) == static_cast<std::byte*>(tensor.get()));
  CHECK_EQ(arena->offset_of(arena->at(0), kArena), 0);
  CHECK_EQ(arena->offset_of(arena->at(0), kArena + 1), -1);
  CHECK_EQ(arena->offset_of(arena->at(0) - 1, 1), -1);
  std::vector<char> ordinary(10);
  CHECK_EQ(arena->offset_of(ordinary.data(), 10), -1);
}

TEST(arena_reuses_freed_memory_zeroed) {
  auto arena = shm::Arena::create(kArena);
  const size_t kBytes = shm::kPage + 1, kPages = 2 * shm::kPage;
  auto first = arena->allocate_tensor(kBytes), second = arena->allocate_tensor(0), third = arena->allocate_tensor(1);
  CHECK(chars(second) >= chars(first) + kPages && chars(third) >= chars(second) + shm::kPage);
  char* place = chars(first);
  std::memset(place, 1, kBytes);
  first.reset();
  auto again = arena->allocate_tensor(kPages);
  CHECK(chars(again) == place);
  CHECK(all_are(place, kPages, 0));
}

TEST(memory_that_somebody_has_locked_is_given_back_and_zeroed) {
  constexpr size_t kBytes = 64 << 10;
  auto arena = shm::Arena::create(kArena);
  const size_t before = pages_of(*arena);
  auto tensor = arena->allocate_tensor(kBytes);
  size_t group = arena->allocate_group(kBytes);
  shm::Pool& pool = *arena->create_pool();
  auto* block = static_cast<char*>(pool.allocate(kBytes));
  char *first = chars(tensor), *second = reinterpret_cast<char*>(arena->at(group));
  for (char* begin : {first, second, block}) {
    CHECK_EQ(mlock(begin, kBytes), 0);  // mlockall(), say
    std::memset(begin, 7, kBytes);
  }
  tensor.reset();
  arena->retire_group(group, kBytes, [] { return true; });
  pool.release(block);
  CHECK_EQ(pages_of(*arena), before);
  for (char* begin : {first, second, block}) CHECK(all_are(begin, kBytes, 0));
  munlock(first, kBytes), munlock(second, kBytes), munlock(block, kBytes);
  pool.close();
}

TEST(a_dead_ranks_gradients_are_given_back_although_a_survivor_has_locked_them) {
  constexpr size_t kBytes = 64 << 10;
  auto arena = shm::Arena::create(kArena);
  shm::Pool& pool = *arena->create_pool();
  auto* block = static_cast<char*>(pool.allocate(kBytes));
  std::memset(block, 7, kBytes);
  auto peer = peer_of(*arena);
  std::byte* const seen = peer->at(arena->offset_of(block, kBytes), kBytes);
  CHECK_EQ(mlock(seen, kBytes), 0);  // mlockall(), say
  peer->discard_pool();
  CHECK(all_are(block, kBytes, 0));
  pool.release(block);
  pool.close();
}

TEST(arena_outlives_its_owner_while_a_tensor_lives) {
  auto tensor = shm::Arena::create(kArena)->allocate_tensor(100);
  std::memset(tensor.get(), 7, 100);
  CHECK_EQ(chars(tensor)[99], 7);
}

TEST(too_much_memory_is_an_error_with_numbers) {
  auto arena = shm::Arena::create(kArena);
  std::string no_room = CHECK_THROWS(arena->allocate_tensor(kArena + 1), ErrorKind::InvalidUsage);
  CHECK(contains(no_room, std::to_string(kArena + 1)) && contains(no_room, std::to_string(kArena)));
  CHECK(contains(no_room, "SYNCENGINE_ARENA_BYTES"));
  for (size_t bytes : {size_t{1} << 60, SIZE_MAX - 4095, SIZE_MAX - 1, SIZE_MAX}) {
    std::string no_memory = CHECK_THROWS(arena->allocate_tensor(bytes), ErrorKind::InvalidUsage);
    CHECK(contains(no_memory, std::to_string(bytes) + " bytes of shared memory wanted") &&
          contains(no_memory, "available"));
  }
  CHECK(contains(CHECK_THROWS(arena->allocate_group(kArena), ErrorKind::InvalidUsage), "SYNCENGINE_ARENA_BYTES"));
  std::string no_arena = CHECK_THROWS(shm::Arena::create(size_t{1} << 62), ErrorKind::InvalidUsage);
  CHECK(contains(no_arena, std::to_string(size_t{1} << 62)) && contains(no_arena, "SYNCENGINE_ARENA_BYTES"));
}

// First fit against a model that knows each byte.
TEST(heap_agrees_with_a_naive_model) {
  constexpr size_t kBegin = 3, kEnd = 600;
  for (unsigned seed = 0; seed < 40; ++seed) {
    std::mt19937 random(seed);
    shm::Heap heap(kBegin, kEnd);
    std::vector<bool> used(kEnd + 1, true);
    std::fill(used.begin() + kBegin, used.begin() + kEnd, false);
    std::vector<std::pair<size_t, size_t>> blocks;
    for (int step = 0; step < 300; ++step) {
      if (!blocks.empty() && random() % 2) {
        std::swap(blocks[random() % blocks.size()], blocks.back());
        auto [offset, bytes] = blocks.back();
        blocks.pop_back();
        heap.release(offset, bytes);
        std::fill_n(used.begin() + static_cast<long>(offset), bytes, false);
        continue;
      }
      const size_t bytes = 1 + random() % 90, alignment = size_t{1} << random() % 7;
      std::optional<size_t> expected;
      for (size_t at = (kBegin + alignment - 1) / alignment * alignment; at + bytes <= kEnd && !expected;
           at += alignment) {
        if (std::none_of(used.begin() + static_cast<long>(at), used.begin() + static_cast<long>(at + bytes),
                         [](bool u) { return u; }))
          expected = at;
      }
      std::optional<size_t> got = heap.allocate(bytes, alignment);
      CHECK(got == expected);
      if (!got) continue;
      blocks.emplace_back(*got, bytes);
      std::fill_n(used.begin() + static_cast<long>(*got), bytes, true);
    }
    for (auto [offset, bytes] : blocks) heap.release(offset, bytes);
    CHECK(heap.allocate(kEnd - kBegin, 1) == kBegin);  // all in one piece again
  }
}

TEST(severed_memory_keeps_its_content_and_hears_nobody) {
  const size_t kPage = shm::kPage, kBytes = 3 * kPage - 100;
  auto arena = shm::Arena::create(kArena);
  auto peer = peer_of(*arena);
  auto tensor = arena->allocate_tensor(kBytes), bystander = arena->allocate_tensor(10);
  auto offset = static_cast<uint64_t>(arena->offset_of(tensor.get(), kBytes));
  auto* theirs = reinterpret_cast<char*>(peer->at(offset, kBytes));
  theirs[kBytes - 1] = 1;
  CHECK_EQ(chars(tensor)[kBytes - 1], 1);
  size_t group = arena->allocate_group(100);

  arena->sever_tensor(offset + kPage + 10, kBytes - kPage - 20);  // the second and third page
  CHECK_EQ(chars(tensor)[kBytes - 1], 1);
  theirs[kBytes - 1] = theirs[kPage] = 2;
  CHECK(chars(tensor)[kBytes - 1] == 1 && chars(tensor)[kPage] == 0);
  chars(tensor)[kPage] = 3;
  CHECK_EQ(theirs[kPage], 2);
  CHECK_EQ(arena->offset_of(tensor.get(), kBytes), -1);
  CHECK_EQ(arena->offset_of(chars(tensor) + kBytes - 1, 1), -1);

  CHECK_EQ(arena->offset_of(tensor.get(), kPage), static_cast<int64_t>(offset));  // the rest goes on
  theirs[kPage - 1] = 7;
  CHECK_EQ(chars(tensor)[kPage - 1], 7);
  auto beside = static_cast<uint64_t>(arena->offset_of(bystander.get(), 10));
  *chars(bystander) = 6;
  CHECK_EQ(*reinterpret_cast<char*>(peer->at(beside, 1)), 6);
  *arena->at(group) = std::byte{4};  // control memory stays shared: peers must hear of the failure
  CHECK(*peer->at(group, 1) == std::byte{4});
  arena->sever_tensor(offset + kPage + 10, kPage);  // again: nothing
  arena->sever_tensor(group, 1);                    // no tensor: nothing
  CHECK(chars(tensor)[kBytes - 1] == 1 && chars(tensor)[kPage] == 3);
}

TEST(a_forked_child_has_copies_of_its_own) {
  auto arena = shm::Arena::create(kArena);
  auto peer = peer_of(*arena);
  auto tensor = arena->allocate_tensor(5000);
  chars(tensor)[4999] = 1;
  CHECK(!arena->forked());
  CHECK(true_in_child([&] {
    bool copied = arena->forked() && chars(tensor)[4999] == 1 && !is_mapped_shared(tensor.get());
    chars(tensor)[4999] = 2;
    return copied && !is_mapped_shared(arena->at(0)) && !is_mapped_shared(&peer->header());
  }));
  CHECK_EQ(chars(tensor)[4999], 1);
  CHECK(!arena->forked());
  chars(tensor)[0] = 5;
  CHECK_EQ(*reinterpret_cast<char*>(peer->at(static_cast<uint64_t>(arena->offset_of(tensor.get(), 1)), 1)), 5);
}

TEST(each_watcher_finds_a_dead_owner_for_itself) {
  auto arena = shm::Arena::create(kArena);
  shm::prepare_liveness(arena->header());
  std::vector<std::unique_ptr<shm::PeerArena>> watchers;
  for (int watcher = 0; watcher < 3; ++watcher) watchers.push_back(peer_of(*arena));
  std::barrier alive(2), may_die(2);
  std::thread owner([&] {
    shm::hold_all(arena->header(), 3);
    alive.arrive_and_wait();
    may_die.arrive_and_wait();
  });
  alive.arrive_and_wait();
  for (int watcher = 0; watcher < 3; ++watcher) CHECK(!shm::found_dead(watchers[watcher]->header(), watcher));
  may_die.arrive_and_wait();
  owner.join();
  for (int watcher : {2, 0, 1}) CHECK(shm::found_dead(watchers[watcher]->header(), watcher));
}

TEST(an_owner_that_lets_go_is_not_dead) {
  auto arena = shm::Arena::create(kArena);
  shm::prepare_liveness(arena->header());
  auto peer = peer_of(*arena);
  std::thread([&] {
    shm::hold_all(arena->header(), 2);
    shm::release_all(arena->header(), 2);
  }).join();
  for (int watcher : {0, 1, 0}) CHECK(!shm::found_dead(peer->header(), watcher));
}

TEST(a_peers_arena_is_checked_before_it_is_believed) {
  constexpr size_t kBytes = 1 << 20;
  auto refusal = [](const UniqueFd& fd, size_t bytes) {
    return CHECK_THROWS(shm::PeerArena(fd.get(), bytes), ErrorKind::InvalidUsage);
  };
  CHECK_EQ(shm::PeerArena(memfd(kBytes, kSeals).get(), kBytes).header().magic, build_id());
  for (int missing : {F_SEAL_SHRINK, F_SEAL_GROW, F_SEAL_SEAL})
    CHECK(contains(refusal(memfd(kBytes, kSeals & ~missing), kBytes), "unsealed"));
  for (size_t wrong : {kBytes + 4096, kBytes - 4096})
    CHECK(contains(refusal(memfd(kBytes, kSeals), wrong), "another size"));
  CHECK(contains(refusal(memfd(64, kSeals), 64), "another size"));
  CHECK(contains(refusal(memfd(kBytes, kSeals, build_id() + 1), kBytes), "another layout"));
  CHECK(contains(refusal(UniqueFd(open("/dev/null", O_RDWR | O_CLOEXEC)), kBytes), "unsealed"));
  // An ordinary file, which has no seals at all.
  std::string path = "/tmp/syncengine-test-XXXXXX";
  UniqueFd file(mkostemp(path.data(), O_CLOEXEC));
  CHECK(unlink(path.c_str()) == 0 && ftruncate(file.get(), kBytes) == 0);
  const uint64_t magic = build_id();
  CHECK(pwrite(file.get(), &magic, sizeof(magic), 0) == sizeof(magic));
  CHECK(contains(refusal(file, kBytes), "unsealed"));
}

TEST(a_peers_offsets_are_checked) {
  auto arena = shm::Arena::create(kArena);
  auto peer = peer_of(*arena);
  CHECK(peer->at(kArena - 1, 1) != nullptr && peer->at(kArena, 0) != nullptr);
  CHECK_THROWS(peer->at(kArena, 1), ErrorKind::InvalidUsage);
  CHECK_THROWS(peer->at(0, kArena + 1), ErrorKind::InvalidUsage);
  CHECK_THROWS(peer->at(UINT64_MAX, 2), ErrorKind::InvalidUsage);
  CHECK_THROWS(peer->at(1, SIZE_MAX), ErrorKind::InvalidUsage);
  CHECK_THROWS(peer->at(0, 1), ErrorKind::InvalidUsage);  // the header
  CHECK_THROWS(peer->at(kArena - 6, 4, 4), ErrorKind::InvalidUsage);
}

// Where vm.memfd_noexec is 2, kernels from 6.3 on may refuse any other. One without the flag for it refuses none.
TEST(shared_memory_is_never_executable) {
  constexpr unsigned kNoExecSeal = 0x8;
  constexpr int kSealExec = 0x20;
  if (!UniqueFd(memfd_create("test", MFD_CLOEXEC | kNoExecSeal))) {
    CHECK_EQ(errno, EINVAL);  // a kernel before 6.3
    return;
  }
  auto arena = shm::Arena::create(kArena);
  CHECK_EQ(fcntl(arena->fd(), F_GET_SEALS) & (kSeals | kSealExec), kSeals | kSealExec);
  struct stat status{};
  CHECK_EQ(fstat(arena->fd(), &status), 0);
  CHECK_EQ(status.st_mode & 0111U, 0U);
}

TEST(default_arenas_fit_into_a_process_together) {
  constexpr size_t kTiB = size_t{1} << 40;
  CHECK_EQ(shm::default_arena_bytes(1 << 30, 2), size_t{1} << 30);
  if constexpr (kSlowdown == 1) CHECK_EQ(shm::default_arena_bytes(2 * kTiB, 2), 2 * kTiB);
  for (int ranks : {2, 7, 64}) {
    const size_t bytes = shm::default_arena_bytes(24 * kTiB, ranks);
    CHECK(bytes % shm::kPage == 0 && bytes >= (kSlowdown == 1 ? kTiB / 2 : 1 << 30));
    CHECK(bytes * ranks <= 32 * kTiB);
  }
}

}  // namespace syncengine::testing
