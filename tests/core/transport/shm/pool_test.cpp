// The pool in which gradients lie: blocks never overlap, are recycled, and go back.
#include "transport/shm/pool.h"

#include <cstring>
#include <map>
#include <random>
#include <set>

#include "shm_memory.h"

namespace syncengine::testing {

namespace {

constexpr size_t kPoolBytes = 64 << 20;
using Pool = PoolOf<kPoolBytes>;

}  // namespace

TEST(pool_blocks_never_overlap_and_keep_what_is_in_them) {
  Pool f;
  std::mt19937 random(1);
  std::map<char*, std::pair<size_t, char>> live;  // begin -> bytes, content
  for (int step = 0; step < 6000 / kSlowdown; ++step) {
    if (live.empty() || random() % 5 < 3) {
      size_t bytes = 1 + random() % (random() % 4 == 0 ? 40 * shm::kPage : 3 * shm::kPage);
      char* block = f.take(bytes);
      if (block == nullptr) continue;  // full
      CHECK(f.pool.owns(block, bytes) && shm::Pool::find(block) == &f.pool);
      auto next = live.lower_bound(block);
      CHECK(next == live.end() || block + bytes <= next->first);
      CHECK(next == live.begin() || std::prev(next)->first + std::prev(next)->second.first <= block);
      char content = static_cast<char>(random());
      std::memset(block, content, bytes);
      live[block] = {bytes, content};
    } else {
      auto victim = std::next(live.begin(), random() % live.size());
      auto [bytes, content] = victim->second;
      CHECK(all_are(victim->first, bytes, content));
      f.pool.release(victim->first);
      live.erase(victim);
    }
    if (step % 500 == 0) f.pool.trim();
  }
  for (auto& [block, what] : live) f.pool.release(block);
}

TEST(a_released_block_serves_the_next_of_its_size_with_its_pages) {
  Pool f;
  char* first = f.take(5 * shm::kPage);
  f.take(shm::kPage);
  std::memset(first, 7, 5 * shm::kPage);
  f.pool.release(first);
  CHECK_EQ(static_cast<void*>(f.take(5 * shm::kPage - 10)), static_cast<void*>(first));
  CHECK_EQ(first[3 * shm::kPage], 7);  // no page was given back and brought again
}

TEST(trim_gives_pages_back_and_other_sizes_use_their_addresses) {
  Pool f;
  std::set<char*> blocks;
  for (int i = 0; i < 8; ++i) blocks.insert(f.take(shm::kPage));
  for (char* block : blocks) {
    *block = 7;
    f.pool.release(block);
  }
  f.pool.trim();
  char* joined = f.take(8 * shm::kPage);
  CHECK_EQ(static_cast<void*>(joined), static_cast<void*>(*blocks.begin()));
  for (int page = 0; page < 8; ++page) CHECK_EQ(joined[page * shm::kPage], 0);
}

TEST(a_block_that_outlives_the_last_model_gives_its_pages_back) {
  Pool f;
  char* block = f.take(3 * shm::kPage);
  std::memset(block, 7, 3 * shm::kPage);
  f.pool.leave();
  CHECK_EQ(block[shm::kPage], 7);
  f.pool.release(block);
  f.pool.join();
  CHECK_EQ(static_cast<void*>(f.take(3 * shm::kPage)), static_cast<void*>(block));
  CHECK_EQ(block[shm::kPage], 0);
}

TEST(a_pool_that_is_full_or_closed_has_nothing) {
  Pool f;
  CHECK(f.take(kPoolBytes) == nullptr);
  char* block = f.take(kPoolBytes / 4);
  CHECK(block != nullptr && f.take(kPoolBytes / 2) == nullptr);
  f.pool.close();
  CHECK(f.take(shm::kPage) == nullptr);
  block[kPoolBytes / 4 - 1] = 1;  // still there
  f.pool.release(block);
}

TEST(a_block_keeps_its_arena_alive) {
  std::weak_ptr<shm::Arena> arena;
  char* block;
  shm::Pool* pool;
  {
    Pool f;
    arena = f.arena;
    pool = &f.pool;
    block = f.take(shm::kPage);
  }
  CHECK(!arena.expired());
  *block = 1;
  pool->release(block);
  CHECK(arena.expired() && shm::Pool::find(block) == nullptr);
}

TEST(a_severed_block_of_a_pool_is_nobodys_any_more) {
  Pool f;
  shm::PeerArena peer(f.arena->fd(), f.arena->bytes());
  char* block = f.take(3 * shm::kPage);
  char* neighbor = f.take(3 * shm::kPage);
  *neighbor = 2;
  std::memset(block, 1, 3 * shm::kPage);
  size_t offset = f.arena->offset_of(block, 3 * shm::kPage);
  f.arena->sever_tensor(offset + shm::kPage, shm::kPage);  // a span that begins within the block
  CHECK_EQ(block[2 * shm::kPage - 1], 1);
  *reinterpret_cast<char*>(peer.at(offset + shm::kPage, 1)) = 9;  // a woken rank
  CHECK_EQ(block[shm::kPage], 1);
  CHECK_EQ(f.arena->offset_of(block, 3 * shm::kPage), -1);
  CHECK(f.arena->offset_of(block, shm::kPage) >= 0);
  CHECK(f.arena->offset_of(neighbor, 3 * shm::kPage) >= 0);
  f.pool.release(block);
  f.pool.trim();
  for (int i = 0; i < 20; ++i) {
    char* other = f.take(shm::kPage);
    CHECK(other < block || other >= block + 3 * shm::kPage);
  }
}

TEST(threads_share_a_pool) {
  Pool f;
  run_ranks(4, [&](int rank) {
    std::mt19937 random(rank);
    std::vector<std::pair<char*, size_t>> mine;
    for (int step = 0; step < 3000 / kSlowdown; ++step) {
      if (mine.size() < 5) {
        size_t bytes = (1 + random() % 4) * shm::kPage;
        if (char* block = f.take(bytes)) {
          std::memset(block, rank, bytes);
          mine.push_back({block, bytes});
        }
      } else {
        auto [block, bytes] = mine[random() % mine.size()];
        CHECK(all_are(block, bytes, static_cast<char>(rank)));
        std::erase(mine, std::pair(block, bytes));
        f.pool.release(block);
      }
    }
    for (auto [block, bytes] : mine) f.pool.release(block);
  });
}

}  // namespace syncengine::testing
