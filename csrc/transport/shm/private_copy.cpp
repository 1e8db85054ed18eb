#include "transport/shm/private_copy.h"

#include <pthread.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <mutex>
#include <set>
#include <string_view>
#include <utility>

#include "transport/shm/arena.h"
#include "transport/shm/region.h"

namespace syncengine::shm {

MappedFile::MappedFile(UniqueFd fd) : fd_(std::move(fd)) {
  struct stat status{};
  if (fstat(fd_.get(), &status) == 0) number_ = status.st_ino, bytes_ = status.st_size;
}

bool MappedFile::is_there() const {
  struct stat status{};
  return fstat(fd_.get(), &status) == 0 && status.st_ino == number_ && status.st_size == bytes_;
}

// Neither mincore() nor the page map would do: both report swapped-out pages as holes.
std::vector<Range> MappedFile::pages_in(Range range) const {
  if (!is_there()) return {range};
  std::vector<Range> pages;
  for (size_t position = range.begin; position < range.end;) {
    off_t data = lseek(fd_.get(), static_cast<off_t>(position), SEEK_DATA);
    if (data < 0 && errno == ENXIO) break;  // a hole until the end
    off_t hole = data < 0 ? -1 : lseek(fd_.get(), data, SEEK_HOLE);
    if (hole < 0) return {range};
    if (static_cast<size_t>(data) >= range.end) break;
    position = std::min(static_cast<size_t>(hole), range.end);
    pages.push_back({static_cast<size_t>(data), position});
  }
  return pages;
}

namespace {

// Closes memory in a forked child. If the kernel refuses, the child ends, as it would write to its parent's memory.
void close_in_child(void* data, size_t bytes) {
  if (make_inaccessible(data, bytes)) return;
  constexpr std::string_view kText =
      "syncengine: a forked child ends: the kernel refuses (mmap) to take its parent's "
      "shared memory away from it\n";
  [[maybe_unused]] const auto written = write(STDERR_FILENO, kText.data(), kText.size());
  _exit(1);
}

}  // namespace

void MappedFile::keep_writes(std::byte* base, Range range) const {
  void* const data = base + range.begin;
  const bool mapped =
      is_there() && mmap(data, range.bytes(), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_NORESERVE | MAP_FIXED,
                         fd_.get(), static_cast<off_t>(range.begin)) == data;
  if (!mapped && mprotect(data, range.bytes(), PROT_READ) != 0) close_in_child(data, range.bytes());
}

bool MappedFile::make_private(std::byte* base, Range range, std::byte* own) const {
  const bool by_kernel = own && is_there();  // the first write makes the kernel copy, so none is lost
  const std::vector<Range> all = by_kernel ? std::vector<Range>{} : pages_in(range);
  const size_t bytes = range.bytes();
  void* data = by_kernel
                   ? mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_NORESERVE, fd_.get(),
                          static_cast<off_t>(range.begin))
                   : mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (data == MAP_FAILED) return false;
  advise(data, bytes, MADV_NOHUGEPAGE);  // a huge page would cover what is not copied, too
  for (Range pages : all)
    std::memcpy(static_cast<std::byte*>(data) + (pages.begin - range.begin), base + pages.begin, pages.bytes());
  if (mremap(data, bytes, bytes, MREMAP_MAYMOVE | MREMAP_FIXED, base + range.begin) == MAP_FAILED) {
    munmap(data, bytes);
    return false;
  }
  auto* const byte = reinterpret_cast<volatile unsigned char*>(own);
  if (by_kernel) *byte = *byte;  // the first write: until then writes of peers would show
  return true;
}

namespace {

struct ArenaRegistry {
  std::mutex mutex;
  std::set<ForkGuard::Memory> memories;
};

ArenaRegistry& registry() {
  static auto* instance = new ArenaRegistry;  // never destroyed: arenas may outlive static destruction
  return *instance;
}

template <class Kind, class Call>
void for_each(const Call& call) {
  for (const ForkGuard::Memory& memory : registry().memories)
    if (auto* const* found = std::get_if<Kind*>(&memory)) call(**found);
}

}  // namespace

void ForkGuard::add(Memory memory) {
  [[maybe_unused]] static int once = pthread_atfork(&before, &in_parent, &in_child);
  std::lock_guard lock(registry().mutex);
  registry().memories.insert(memory);
}

void ForkGuard::remove(Memory memory) {
  std::lock_guard lock(registry().mutex);
  registry().memories.erase(memory);
}

// Locks in the order that docs/threads.md gives.
void ForkGuard::before() {
  registry().mutex.lock();
  Pool::lock_all();
  for_each<Arena>([](Arena& arena) { arena.mutex_.lock(); });
}

void ForkGuard::in_parent() {
  for_each<Arena>([](Arena& arena) { arena.mutex_.unlock(); });
  Pool::unlock_all();
  registry().mutex.unlock();
}

// Makes async-signal-safe calls only: other threads' locks are lost in the child.
void ForkGuard::in_child() {
  for_each<Arena>([](Arena& arena) {
    arena.become_forked();
    arena.mutex_.unlock();
  });
  for_each<PeerArena>([](PeerArena& peer) { close_in_child(peer.mapping_.data(), peer.mapping_.bytes()); });
  for_each<Region>([](Region& region) { region.become_forked(); });
  Pool::unlock_all();
  registry().mutex.unlock();
}

void Arena::become_forked() {
  if (forked_) return;  // a child's child inherits as usual
  forked_ = true;
  for (Range part : inherited_) file_.keep_writes(mapping_.data(), part);
  file_.reset();
}

}  // namespace syncengine::shm
