
#include "transport/shm/private_copy.h"

#include <pthread.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <mutex>
#include <new>
#include <set>
#include <utility>

#include "base/resources.h"
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

// Neither mincore() nor the page map will do: both take what was swapped out for a hole.
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

PrivateCopy::PrivateCopy(size_t bytes) : data_(nullptr), bytes_(bytes) {
  void* data = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (data == MAP_FAILED) return;
  data_ = static_cast<std::byte*>(data);
  madvise(data, bytes, MADV_NOHUGEPAGE);  // a huge page would cover what is not copied, too
}

PrivateCopy::PrivateCopy(PrivateCopy&& other) noexcept
    : data_(std::exchange(other.data_, nullptr)), bytes_(other.bytes_) {}

PrivateCopy::~PrivateCopy() {
  if (data_) munmap(data_, bytes_);
}

void PrivateCopy::fill(size_t offset, const std::byte* from, size_t bytes) {
  if (data_) std::memcpy(data_ + offset, from, bytes);
}

bool PrivateCopy::read(size_t offset, int file, size_t begin, size_t bytes) {
  for (size_t done = 0; data_ && done < bytes;) {
    const ssize_t got = pread(file, data_ + offset + done, bytes - done, static_cast<off_t>(begin + done));
    if (got < 0 && errno == EINTR) continue;
    if (got <= 0) return false;
    done += static_cast<size_t>(got);
  }
  return true;
}

bool PrivateCopy::put(std::byte* address) {
  if (!data_ || mremap(data_, bytes_, bytes_, MREMAP_MAYMOVE | MREMAP_FIXED, address) == MAP_FAILED) return false;
  data_ = nullptr;
  return true;
}

namespace {

struct Registry {
  std::mutex mutex;
  std::set<ForkGuard::Memory> memories;
};

Registry& registry() {
  static auto* instance = new Registry;  // never destroyed: arenas may outlive static destruction
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

// Locks in the order of docs/threads.md.
void ForkGuard::before() {
  registry().mutex.lock();
  Pool::lock_all();
  for_each<Arena>([](Arena& arena) { arena.mutex_.lock(); });
  try {
    size_t bytes = 0;
    for_each<Arena>([&](Arena& arena) { bytes += arena.prepare_inheritance(); });
    // The kernel would not refuse but kill, and hardly any child looks at gradients.
    if (bytes > 0 && bytes > available_memory()) return;
    for_each<Arena>([](Arena& arena) { arena.copy_inheritance(); });
  } catch (const std::bad_alloc&) {
    for_each<Arena>([](Arena& arena) { arena.inheritance_.clear(); });
  }
}

void ForkGuard::in_parent() {
  for_each<Arena>([](Arena& arena) {
    arena.inheritance_.clear();
    arena.mutex_.unlock();
  });
  Pool::unlock_all();
  registry().mutex.unlock();
}

// Only async-signal-safe calls here: other threads' locks are lost in the child.
void ForkGuard::in_child() {
  for_each<Arena>([](Arena& arena) {
    arena.become_forked();
    arena.mutex_.unlock();
  });
  for_each<PeerArena>([](PeerArena& peer) { make_inaccessible(peer.mapping_.data(), peer.mapping_.bytes()); });
  for_each<Region>([](Region& region) { region.become_forked(); });
  Pool::unlock_all();
  registry().mutex.unlock();
}

// What a forked child gets of an arena, made before the fork: what is written afterwards, by whomever, it does not see.

namespace {

Range common(Range a, Range b) { return {std::max(a.begin, b.begin), std::min(a.end, b.end)}; }

// The ranges' parts within `bounds`; those that overlap as one.
std::vector<Range> united_within(std::vector<Range> ranges, Range bounds) {
  std::sort(ranges.begin(), ranges.end(), [](Range a, Range b) { return a.begin < b.begin; });
  std::vector<Range> united;
  for (Range range : ranges) {
    range = common(range, bounds);
    if (range.begin >= range.end) continue;
    if (!united.empty() && range.begin <= united.back().end)
      united.back().end = std::max(united.back().end, range.end);
    else
      united.push_back(range);
  }
  return united;
}

}  // namespace

void Arena::copy_pages(PrivateCopy& copy, Range range, const std::vector<Range>& all) const {
  const bool own = file_.is_there();
  for (Range pages : all) {
    const size_t offset = pages.begin - range.begin;
    if (!own || !copy.read(offset, file_.get(), pages.begin, pages.bytes()))
      copy.fill(offset, at(pages.begin), pages.bytes());
  }
}

std::vector<Range> Arena::alive(size_t offset, const TensorMemory& memory) const {
  if (!memory.pool) return {{offset, offset + memory.bytes}};
  const Pool* pool = Pool::find(at(offset));
  if (!pool) return {};
  std::vector<Range> blocks = pool->alive();
  for (Range& block : blocks) block = {offset + block.begin, offset + block.end};
  return blocks;
}

size_t Arena::prepare_inheritance() {
  inheritance_.clear();
  if (forked_) return 0;  // a child's child inherits as usual
  size_t bytes = 0;
  for (const auto& [offset, memory] : tensors_) {
    const std::vector<Range> blocks = alive(offset, memory);
    size_t position = offset;
    // A pool becomes one piece, of which only blocks have memory: thousands of mappings would be too many.
    auto share = [&](size_t end) {
      const std::vector<Range> parts = united_within(blocks, {position, end});
      if (parts.empty()) return;
      inheritance_.push_back({.range = {parts.front().begin, parts.back().end}, .severed = false});
      for (Range part : parts) {
        for (Range pages : file_.pages_in(part)) {
          inheritance_.back().pages.push_back(pages);
          bytes += pages.bytes();
        }
      }
    };
    for (Range severed : united_within(severed_, {offset, offset + memory.bytes})) {
      share(severed.begin);
      inheritance_.push_back({.range = severed, .severed = true});
      position = severed.end;
    }
    share(offset + memory.bytes);
  }
  return bytes;
}

void Arena::copy_inheritance() {
  for (auto& piece : inheritance_) {
    if (piece.severed) continue;
    piece.copy.emplace(piece.range.bytes());
    copy_pages(*piece.copy, piece.range, piece.pages);
  }
}

void Arena::become_forked() {
  if (forked_) return;
  forked_ = true;
  file_.reset();  // or the child would keep the memory after its parent
  // Tensors stay readable and writable; control memory and staging become inaccessible.
  size_t position = 0;
  for (auto& piece : inheritance_) {
    make_inaccessible(at(position), piece.range.begin - position);
    if (!piece.severed && !(piece.copy && piece.copy->put(at(piece.range.begin))))
      make_inaccessible(at(piece.range.begin), piece.range.bytes());
    position = piece.range.end;
  }
  make_inaccessible(at(position), bytes() - position);
}

}  // namespace syncengine::shm
