// A grid of threads on few threads of the host: blocks run side by side, a block's threads take turns. Each has a stack
// of its own, and is left at a barrier until the others are there.
#include <ucontext.h>

#include <algorithm>
#include <atomic>
#include <mutex>
#include <thread>
#include <utility>

#include "kernel_language.h"

namespace software {

namespace {

constexpr size_t kStack = 32 << 10;
constexpr unsigned kSideBySide = 4;  // blocks of one grid

// Where a stack was left. The compiler's own jumps ask nothing of the system, and know nothing of sanitizers.
struct Left {
  void* words[5];
};

struct Thread {
  Left left;
  ucontext_t start;
  std::unique_ptr<std::byte[]> stack;
  bool started = false, waits = false, done = false;
  Place place;
};

// A block's threads; used again by other blocks, since starting a thread costs more than most of them do.
struct Block {
  Left scheduler;
  std::vector<std::unique_ptr<Thread>> threads;
  Thread* running = nullptr;
  const std::function<void()>* body = nullptr;
  bool vote = false, result = false;
};
thread_local Block* current = nullptr;

// Asked anew each time: a thread goes on where it was left, and that may be another thread of the host.
[[gnu::noinline]] Block& here_and_now() {
  asm volatile("" ::: "memory");
  return *current;
}

[[gnu::noinline, noreturn]] void go_to(Left& place) { __builtin_longjmp(place.words, 1); }

[[gnu::noinline]] void leave() {
  if (__builtin_setjmp(here_and_now().running->left.words) == 0) go_to(here_and_now().scheduler);
}

[[gnu::noinline]] void enter(Thread& thread) {
  here_and_now().running = &thread;
  if (__builtin_setjmp(here_and_now().scheduler.words) != 0) return;
  if (std::exchange(thread.started, true)) go_to(thread.left);
  setcontext(&thread.start);
}

void run_for_ever() {
  for (;;) {
    (*here_and_now().body)();
    here_and_now().running->done = true;
    leave();
  }
}

std::unique_ptr<Thread> make_thread() {
  auto thread = std::make_unique<Thread>();
  thread->stack.reset(new std::byte[kStack]);
  getcontext(&thread->start);
  thread->start.uc_stack = {.ss_sp = thread->stack.get(), .ss_flags = 0, .ss_size = kStack};
  makecontext(&thread->start, run_for_ever, 0);
  return thread;
}

// Runs each thread that can go on, until all have ended. Who has ended does not count at a barrier. (On devices it must
// not have left others there; no kernel does.)
void take_turns(Block& block, size_t count) {
  for (;;) {
    bool alive = false, moved = false;
    for (size_t i = 0; i < count; ++i) {
      Thread& thread = *block.threads[i];
      if (!thread.done && !thread.waits) {
        enter(thread);
        moved = true;
      }
      alive |= !thread.done;
    }
    if (!alive) return;
    if (moved) continue;
    dawdle();
    block.result = std::exchange(block.vote, false);
    for (size_t i = 0; i < count; ++i) block.threads[i]->waits = false;
  }
}

void run_block(Block& block, dim3 grid, dim3 size, dim3 at) {
  const size_t count = size_t{size.x} * size.y * size.z;
  while (block.threads.size() < count) block.threads.push_back(make_thread());
  for (size_t i = 0; i < count; ++i) {
    Thread& thread = *block.threads[i];
    thread.done = false;
    const auto n = static_cast<unsigned>(i);
    thread.place = {grid, at, dim3(n % size.x, n / size.x % size.y, n / size.x / size.y)};
  }
  take_turns(block, count);
}

std::mutex mutex;
auto& unused = *new std::vector<std::unique_ptr<Block>>;

std::unique_ptr<Block> take_block() {
  std::lock_guard lock(mutex);
  if (unused.empty()) return std::make_unique<Block>();
  auto block = std::move(unused.back());
  unused.pop_back();
  return block;
}

}  // namespace

Place& here() { return here_and_now().running->place; }

bool barrier(bool vote) {
  here_and_now().vote |= vote;
  here_and_now().running->waits = true;
  leave();
  return here_and_now().result;
}

void pause() {
  leave();
  std::this_thread::yield();
}

void run_grid(dim3 grid, dim3 size, const std::function<void()>& body) {
  const unsigned blocks = grid.x * grid.y * grid.z;
  std::atomic<unsigned> next = 0;
  auto work = [&] {
    auto block = take_block();
    block->body = &body;
    current = block.get();
    for (unsigned n; (n = next++) < blocks;)
      run_block(*block, grid, size, dim3(n % grid.x, n / grid.x % grid.y, n / grid.x / grid.y));
    std::lock_guard lock(mutex);
    unused.push_back(std::move(block));
  };
  std::vector<std::thread> others;
  for (unsigned i = 1; i < std::min(blocks, kSideBySide); ++i) others.emplace_back(work);
  work();
  for (auto& other : others) other.join();
}

}  // namespace software
