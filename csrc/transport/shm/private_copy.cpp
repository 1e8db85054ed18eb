#include "transport/shm/private_copy.h"

#include <pthread.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <set>
#include <string_view>
#include <utility>

#include "transport/shm/pool.h"

namespace syncengine::shm {

namespace {

struct ArenaRegistry {
  std::mutex mutex;
  std::set<const ForkGuard*> guards;
};

ArenaRegistry& registry = *new ArenaRegistry;  // never destroyed: arenas may outlive static destruction

}  // namespace

MappedFile::MappedFile(UniqueFd fd) : fd_(std::move(fd)) {
  struct stat status{};
  if (fstat(fd_.get(), &status) == 0) number_ = status.st_ino, bytes_ = status.st_size;
}

bool MappedFile::is_there() const {
  struct stat status{};
  return fstat(fd_.get(), &status) == 0 && status.st_ino == number_ && status.st_size == bytes_;
}

// Asks the file where it has data and holes, since mincore() and the page map report swapped-out pages as holes.
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

void close_in_child(void* data, size_t bytes) {
  if (make_inaccessible(data, bytes)) return;
  constexpr std::string_view kText =
      "syncengine: a forked child ends: the kernel refuses (mmap) to take its parent's "
      "shared memory away from it\n";
  [[maybe_unused]] const auto written = write(STDERR_FILENO, kText.data(), kText.size());
  _exit(1);
}

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
  const int flags = MAP_PRIVATE | MAP_NORESERVE | (by_kernel ? 0 : MAP_ANONYMOUS);
  void* data = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, flags, by_kernel ? fd_.get() : -1,
                    by_kernel ? static_cast<off_t>(range.begin) : 0);
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

ForkGuard::ForkGuard(std::function<void()> in_child, std::mutex* mutex)
    : in_child_(std::move(in_child)), mutex_(mutex) {
  [[maybe_unused]] static int once = pthread_atfork(&lock_all, &unlock_all, [] {
    for (const ForkGuard* guard : registry.guards) guard->in_child_();
    unlock_all();
  });
  std::lock_guard lock(registry.mutex);
  registry.guards.insert(this);
}

ForkGuard::~ForkGuard() {
  std::lock_guard lock(registry.mutex);
  registry.guards.erase(this);
}

// Locks in the order that docs/threads.md gives.
void ForkGuard::lock_all() {
  registry.mutex.lock();
  Pool::lock_all();
  for (const ForkGuard* guard : registry.guards)
    if (guard->mutex_) guard->mutex_->lock();
}

void ForkGuard::unlock_all() {
  for (const ForkGuard* guard : registry.guards)
    if (guard->mutex_) guard->mutex_->unlock();
  Pool::unlock_all();
  registry.mutex.unlock();
}

}  // namespace syncengine::shm
