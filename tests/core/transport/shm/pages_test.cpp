// What is freed, severed or inherited by a fork leaves what lies beside it alone, on kernels with any pages: run by
// `make pages` under larger ones, too (page_size.cpp). And what happens where the kernel refuses.
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "child.h"
#include "shm_memory.h"
#include "transport/shm/arena.h"

namespace syncengine::testing {

namespace {

constexpr size_t kBytes = 4096;  // of a tensor, less than a page of most kernels
constexpr int kTensors = 64;

// Tensors side by side, each filled with its number, and the memory as a peer maps it.
struct Tensors {
  std::shared_ptr<shm::Arena> arena = shm::Arena::create(64 * kMiB);
  shm::PeerArena peer{arena->fd(), arena->bytes()};
  std::vector<std::shared_ptr<void>> tensors;

  Tensors() {
    for (int i = 0; i < kTensors; ++i) {
      tensors.push_back(arena->allocate_tensor(kBytes));
      std::memset(at(i), i, kBytes);
    }
  }
  char* at(int i) const { return chars(tensors[i]); }
  size_t offset(int i) const { return static_cast<size_t>(reinterpret_cast<std::byte*>(at(i)) - arena->at(0)); }
  char* as_peer(int i) const { return reinterpret_cast<char*>(peer.at(offset(i), kBytes)); }
  int changed() const {
    int count = 0;
    for (int i = 0; i < kTensors; ++i) count += tensors[i] && !all_are(at(i), kBytes, static_cast<char>(i));
    return count;
  }
};

// While it lives the kernel refuses this process any mapping, also in the place of another one.
struct NoMappings : Limited {
  NoMappings() : Limited(RLIMIT_AS, kMiB) {}
};

}  // namespace

TEST(a_freed_tensor_takes_no_neighbor_with_it) {
  Tensors f;
  for (int i = 0; i < kTensors; i += 3) {
    f.tensors[i].reset();
    CHECK_EQ(f.changed(), 0);
  }
}

TEST(freed_tensors_take_nothing_of_a_communicators_block) {
  constexpr size_t kBlock = 64 << 10;
  Tensors f;
  const size_t group = f.arena->allocate_group(kBlock);
  auto* block = reinterpret_cast<char*>(f.arena->at(group));
  std::memset(block, 7, kBlock);
  f.tensors.clear();
  CHECK(all_are(block, kBlock, 7));
}

TEST(a_released_gradient_takes_no_neighbor_with_it) {
  PoolOf<64 * kMiB> f;
  f.pool.leave();  // released pages go back at once
  std::array<char*, kTensors> blocks{};
  for (int i = 0; i < kTensors; ++i) std::memset(blocks[i] = f.take(kBytes), i, kBytes);
  for (int i = 0; i < kTensors; ++i) {
    if (i % 4 == 0) f.pool.release(blocks[i]);
    for (int j = 0; j < kTensors; ++j)
      CHECK((j % 4 == 0 && j <= i) || all_are(blocks[j], kBytes, static_cast<char>(j)));
  }
  for (int i = 0; i < kTensors; ++i)
    if (i % 4 != 0) f.pool.release(blocks[i]);
  f.pool.join();
}

TEST(what_is_severed_is_out_of_a_peers_reach_and_nothing_else) {
  for (int first : {0, 1, 3}) {
    Tensors f;
    for (int i = first; i < kTensors; i += 8) {
      f.arena->sever_tensor(f.offset(i), kBytes);
      CHECK(f.arena->is_severed(f.offset(i), kBytes));
    }
    CHECK_EQ(f.changed(), 0);
    for (int i = 0; i < kTensors; ++i) std::memset(f.as_peer(i), 99, kBytes);
    for (int i = 0; i < kTensors; ++i) CHECK(all_are(f.at(i), kBytes, i % 8 == first ? static_cast<char>(i) : 99));
  }
}

TEST(what_a_child_writes_stays_with_it_also_beside_what_was_severed) {
  for (bool severs : {false, true}) {
    Tensors f;
    for (int i = 1; severs && i < kTensors; i += 8) f.arena->sever_tensor(f.offset(i), kBytes);
    CHECK(true_in_child([&] {
      if (f.changed() != 0) return false;
      for (int i = 0; i < kTensors; ++i) std::memset(f.at(i), 77, kBytes);
      return true;
    }));
    CHECK_EQ(f.changed(), 0);
  }
}

TEST(gradients_of_the_smallest_size_share_no_page) {
  PoolOf<64 * kMiB> f;
  const auto page = static_cast<size_t>(sysconf(_SC_PAGESIZE));
  const auto number = [&](char* block) { return reinterpret_cast<uintptr_t>(block) / page; };
  char *first = f.take(1), *second = f.take(page);
  CHECK(number(first) != number(second) && number(second + page - 1) == number(second));
  f.pool.release(first), f.pool.release(second);
}

TEST(what_the_kernel_does_not_sever_is_not_recorded_and_stops_the_process) {
  if constexpr (kSlowdown > 1) return;  // sanitizers map memory of their own
  CHECK(true_in_child([] {
    Tensors f;
    std::string text;
    {
      NoMappings refused;
      text = CHECK_THROWS(f.arena->sever_tensor(f.offset(5), kBytes), ErrorKind::Aborted);
    }
    CHECK(contains(text, "the kernel refused (mmap)") && contains(text, std::strerror(ENOMEM)));
    CHECK(!f.arena->is_severed(f.offset(5), kBytes) && f.changed() == 0);
    CHECK(contains(CHECK_THROWS(shm::throw_if_exposed(), ErrorKind::InvalidUsage), "vm.max_map_count"));
    CHECK_THROWS(shm::Arena::create(kMiB), ErrorKind::InvalidUsage);
    f.arena->sever_tensor(f.offset(5), kBytes);  // once the kernel lets it
    std::memset(f.as_peer(5), 99, kBytes);
    return f.arena->is_severed(f.offset(5), kBytes) && f.changed() == 0;
  }));
}

TEST(a_child_that_can_not_be_kept_out_of_shared_memory_ends) {
  if constexpr (kSlowdown > 1) return;  // sanitizers map memory of their own
  Tensors f;
  pid_t child = 0;
  {
    NoMappings refused;
    child = start_child([] { return true; });
  }
  int status = 0;
  CHECK_EQ(waitpid(child, &status, 0), child);
  CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 1);
}

// `make pages` runs it under pages of 128 KiB, too.
TEST(pages_of_another_size_are_refused) {
  if (shm::kPage <= 64 << 10) return shm::check_page_size();
  const std::string text = CHECK_THROWS(shm::Arena::create(kMiB), ErrorKind::InvalidUsage);
  CHECK(contains(text, "pages are of 131072 bytes") && contains(text, "4 KiB to 64 KiB"));
}

}  // namespace syncengine::testing
