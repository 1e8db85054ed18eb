// What forked children have of an arena: what is there, copies of what they write, and none of their parent's memory.
#include <sys/stat.h>

#include <atomic>
#include <cstring>
#include <random>
#include <thread>

#include "child.h"
#include "shm_memory.h"

namespace syncengine::testing {

namespace {

constexpr long kNoise = kMiB;  // of the process itself, its sanitizer's aside

// Whether the child has about `wanted` more bytes of its own than its parent had at the fork.
bool took(long before, long wanted) {
  const long bytes = memory_of_process("Anonymous") - before;
  if (!kCountsBytes || std::labs(bytes - wanted) <= kNoise) return true;
  std::fprintf(stderr, "a child took %ld bytes, not %ld\n", bytes, wanted);
  return false;
}

struct Filled : PoolOf<512 * kMiB> {
  char* take(size_t bytes, int content) { return static_cast<char*>(std::memset(PoolOf::take(bytes), content, bytes)); }
};

}  // namespace

TEST(a_child_takes_no_more_than_it_writes) {
  Filled f;
  auto tensor = f.arena->allocate_tensor(64 * kMiB);
  std::memset(chars(tensor) + 10 * kMiB, 7, 2 * kMiB);
  char* block = f.take(8 * kMiB, 4);
  const size_t shared = pages_of(*f.arena);
  const long before = memory_of_process("Anonymous");
  CHECK(true_in_child([&] {
    const bool right = all_are(chars(tensor) + 10 * kMiB, 2 * kMiB, 7) && all_are(block, 8 * kMiB, 4);
    if (!right || !took(before, 0)) return false;
    std::memset(chars(tensor) + 10 * kMiB, 8, 2 * kMiB);
    std::memset(block, 9, kMiB);
    return took(before, 3 * kMiB) && block[kMiB] == 4;
  }));
  CHECK_EQ(pages_of(*f.arena), shared);
  CHECK(all_are(chars(tensor) + 10 * kMiB, 2 * kMiB, 7) && all_are(block, 8 * kMiB, 4));
  f.pool.release(block);
}

TEST(a_child_frees_its_copies_and_its_own_child_takes_no_more) {
  Filled f;
  auto tensor = f.arena->allocate_tensor(8 * kMiB);
  std::memset(tensor.get(), 1, 8 * kMiB);
  char* block = f.take(8 * kMiB, 2);
  const long before = memory_of_process("Anonymous");
  CHECK(true_in_child([&] {
    std::memset(tensor.get(), 3, 8 * kMiB);
    std::memset(block, 4, 8 * kMiB);
    if (!took(before, 16 * kMiB)) return false;
    const bool right =
        true_in_child([&] { return took(before, 16 * kMiB) && chars(tensor)[kMiB] == 3 && block[kMiB] == 4; });
    tensor.reset();
    if (!took(before, 8 * kMiB)) return false;
    f.pool.release(block);
    return right && took(before, 0) && f.pool.allocate(shm::kPage) == nullptr;
  }));
  CHECK(chars(tensor)[kMiB] == 1 && block[kMiB] == 2);
  f.pool.release(block);
}

TEST(a_child_keeps_what_was_severed) {
  Filled f;
  shm::PeerArena peer(f.arena->fd(), f.arena->bytes());
  char* first = f.take(4 * shm::kPage, 1);
  char* block = f.take(8 * shm::kPage, 2);
  char* last = f.take(4 * shm::kPage, 3);
  auto tensor = f.arena->allocate_tensor(4 * shm::kPage);
  std::memset(tensor.get(), 4, 4 * shm::kPage);
  for (char* begin : {block + shm::kPage, block + 5 * shm::kPage, chars(tensor)}) {
    const auto offset = static_cast<size_t>(f.arena->offset_of(begin, 1));
    f.arena->sever_tensor(offset, 2 * shm::kPage);
    f.arena->sever_tensor(offset, shm::kPage);
    std::memset(peer.at(offset, shm::kPage), 9, shm::kPage);  // a woken rank
  }
  CHECK(true_in_child([&] {
    return all_are(first, 4 * shm::kPage, 1) && all_are(block, 8 * shm::kPage, 2) && all_are(last, 4 * shm::kPage, 3) &&
           all_are(chars(tensor), 4 * shm::kPage, 4);
  }));
}

TEST(severing_takes_no_more_than_was_touched) {
  Filled f;
  auto tensor = f.arena->allocate_tensor(64 * kMiB);
  chars(tensor)[kMiB] = 1;
  const size_t shared = pages_of(*f.arena);
  const long before = memory_of_process("Anonymous");
  f.arena->sever_tensor(static_cast<size_t>(f.arena->offset_of(tensor.get(), 1)), 64 * kMiB);
  CHECK(took(before, 0));
  CHECK_EQ(pages_of(*f.arena), shared);
  CHECK(chars(tensor)[kMiB] == 1 && chars(tensor)[0] == 0);
}

TEST(what_was_severed_is_given_back_once_it_is_freed) {
  Filled f;
  const size_t shared = pages_of(*f.arena);
  const long before = memory_of_process("Anonymous");
  std::vector<char*> lost;
  for (int round = 0; round < 3; ++round) {
    auto tensor = f.arena->allocate_tensor(8 * kMiB);
    char* block = f.take(8 * kMiB, 1);
    std::memset(tensor.get(), 1, 8 * kMiB);
    for (char* begin : {chars(tensor), block}) {
      lost.push_back(begin + kMiB);
      f.arena->sever_tensor(static_cast<size_t>(f.arena->offset_of(lost.back(), 1)), 2 * kMiB);
      std::memset(begin, 2, 8 * kMiB);
    }
    tensor.reset();
    f.pool.release(block);
    CHECK_EQ(pages_of(*f.arena), shared);
    CHECK(std::labs(memory_of_process("Anonymous") - before) <= kNoise || !kCountsBytes);
  }
  std::vector<std::shared_ptr<void>> others;
  std::vector<char*> blocks;
  for (int i = 0; i < 100; ++i) {  // never its addresses, where a woken rank may write
    const auto& tensor = others.emplace_back(f.arena->allocate_tensor(kMiB));
    char* block = blocks.emplace_back(f.take(kMiB, 3));
    CHECK(all_are(chars(tensor), kMiB, 0));
    for (char* begin : {chars(tensor), block})
      for (char* other : lost) CHECK(begin + kMiB <= other || other + 2 * kMiB <= begin);
    std::memset(tensor.get(), 3, kMiB);
  }
  CHECK(true_in_child([] { return true; }));
  for (char* block : blocks) f.pool.release(block);
}

TEST(what_was_severed_stays_for_those_who_may_still_read_it) {
  Filled f;
  const shm::PeerArena peer(f.arena->fd(), f.arena->bytes());
  const size_t group = f.arena->allocate_group(1);
  auto tensor = f.arena->allocate_tensor(kMiB);
  char* block = f.take(kMiB, 1);
  std::memset(tensor.get(), 1, kMiB);
  std::vector<const char*> theirs;
  for (char* begin : {chars(tensor), block}) {
    const auto offset = static_cast<size_t>(f.arena->offset_of(begin, 1));
    theirs.push_back(reinterpret_cast<const char*>(peer.at(offset, kMiB)));
    f.arena->sever_tensor(offset, shm::kPage);  // for a communicator on one host, which needs nothing of it
    f.arena->sever_tensor(offset, shm::kPage, group);
  }
  tensor.reset();
  f.pool.release(block);
  bool unused = false;
  f.arena->retire_group(group, 1, [&unused] { return unused; });
  for (const char* bytes : theirs) CHECK(all_are(bytes, shm::kPage, 1));
  unused = true;
  f.arena->allocate_group(1);
  for (const char* bytes : theirs) CHECK(all_are(bytes, shm::kPage, 0));
}

TEST(severing_again_keeps_what_was_written_since) {
  Filled f;
  auto* block = static_cast<char*>(f.pool.allocate(8 * shm::kPage));  // no page of it is there yet
  const auto offset = static_cast<size_t>(f.arena->offset_of(block, 1));
  f.arena->sever_tensor(offset + 2 * shm::kPage, 2 * shm::kPage);
  std::memset(block, 5, 8 * shm::kPage);
  f.arena->sever_tensor(offset, 8 * shm::kPage);
  CHECK(all_are(block, 8 * shm::kPage, 5));
  CHECK(true_in_child([&] { return all_are(block, 8 * shm::kPage, 5); }));
}

TEST(a_child_has_no_descriptor_of_the_memory) {
  auto arena = shm::Arena::create(512 * kMiB);
  const int fd = arena->fd();
  struct stat own{};
  fstat(fd, &own);
  CHECK(true_in_child([&] {
    struct stat other{};
    return fstat(fd, &other) != 0 || other.st_ino != own.st_ino;
  }));
}

TEST(forks_beside_threads_that_allocate_come_through) {
  Filled f;
  std::atomic<bool> over{false};
  std::vector<std::thread> threads;
  for (unsigned seed = 0; seed < 3; ++seed) {
    threads.emplace_back([&, seed] {
      std::mt19937 random(seed);
      std::vector<void*> mine;
      while (!over) {
        if (mine.size() < 20) {
          void* block = f.pool.allocate((1 + random() % 300) * shm::kPage);
          if (block) *static_cast<char*>(block) = 1, mine.push_back(block);
          f.arena->allocate_tensor(random() % 100 * shm::kPage);
        } else {
          std::swap(mine[random() % mine.size()], mine.back());
          f.pool.release(mine.back());
          mine.pop_back();
          if (random() % 50 == 0) f.pool.trim();
        }
      }
      for (void* block : mine) f.pool.release(block);
    });
  }
  char* block = f.take(5 * shm::kPage, 6);
  int good = 0;
  for (int round = 0; round < 60 / kSlowdown; ++round) {
    good += true_in_child([&] {
      const bool right = all_are(block, 5 * shm::kPage, 6) && f.pool.allocate(shm::kPage) == nullptr;
      f.pool.release(block);
      return right;
    });
  }
  over = true;
  for (auto& thread : threads) thread.join();
  CHECK_EQ(good, 60 / kSlowdown);
  f.pool.release(block);
}

}  // namespace syncengine::testing
