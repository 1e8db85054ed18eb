#include "transport/shm/arena.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/resource.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "base/build_id.h"
#include "base/error.h"
#include "base/resources.h"
#include "base/thread.h"

namespace syncengine::shm {

namespace {

const size_t kHeapBegin = round_up(sizeof(ArenaHeader), kPage);

bool has_addresses(size_t bytes) {
  void* probe = mmap(nullptr, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (probe == MAP_FAILED) return false;
  return munmap(probe, bytes) == 0;
}

// Returns `bytes`, if memory `fd` from a peer is sealed at that size, with room for more than the header; else throws.
size_t checked_size(int fd, size_t bytes) {
  if (sealed_size(fd) == bytes && bytes > kHeapBegin) return bytes;
  throw Error(ErrorKind::InvalidUsage, "a peer sent shared memory of another size, or unsealed");
}

constexpr char kExposed[] =
    "this process can't go on: the kernel refused (mmap) to take memory of syncengine.empty, or gradients, away from a "
    "rank that may still write to them; the limit of mappings (vm.max_map_count) may be too low";
std::atomic<bool> exposed = false;  // a peer may still write to memory of this process that was to be severed

}  // namespace

void throw_if_exposed() {
  if (exposed) throw Error(ErrorKind::InvalidUsage, kExposed);
}

size_t default_arena_bytes(size_t memory, int ranks) {
  constexpr size_t kMost = size_t{1} << 45;    // for all arenas together: a quarter of the addresses of x86-64
  constexpr size_t kLeast = size_t{64} << 20;  // hardly anything fits into less, so an error is better
  const auto count = static_cast<size_t>(ranks);
  rlimit file_size{};  // of shared memory, too; RLIM_INFINITY is the largest number
  if (getrlimit(RLIMIT_FSIZE, &file_size) == 0) memory = std::min(memory, std::max<size_t>(kLeast, file_size.rlim_cur));
  size_t bytes = std::min(memory, kMost / count);
  while (bytes > kLeast && !has_addresses(2 * count * bytes)) bytes /= 2;
  return round_down(bytes, kPage);
}

PeerArena::PeerArena(int fd, size_t bytes) : mapping_(fd, checked_size(fd, bytes)) {
  if (header().magic != build_id())
    throw Error(ErrorKind::InvalidUsage,
                "a peer's shared memory has another layout: do all ranks run the same syncengine?");
}

bool PeerArena::is_inside(uint64_t offset, uint64_t bytes) const {
  return offset >= kHeapBegin && offset <= mapping_.bytes() && bytes <= mapping_.bytes() - offset;
}

std::byte* PeerArena::at(uint64_t offset, size_t bytes, size_t alignment) const {
  if (!is_inside(offset, bytes) || offset % alignment != 0)
    throw Error(ErrorKind::InvalidUsage, "a peer published an offset outside its arena");
  return mapping_.data() + offset;
}

void PeerArena::discard_pool() const {
  const uint64_t bytes = header().pool_bytes.load(std::memory_order_acquire);  // acquire: the offset
  const uint64_t offset = header().pool_offset.load(std::memory_order_relaxed);
  if (bytes == 0 || !is_inside(offset, bytes)) return;
  std::byte* const pool = mapping_.data() + offset;
  // Linux spares locked pages (mlockall) until they are unlocked. Nobody needs these any more.
  if (!advise(pool, bytes, MADV_REMOVE) && munlock(pool, bytes) == 0) advise(pool, bytes, MADV_REMOVE);
}

std::shared_ptr<Arena> Arena::create(size_t bytes) {
  check_page_size();
  throw_if_exposed();
  bytes = round_up(bytes, kPage);
  return std::shared_ptr<Arena>(
      new Arena(create_sealed_memfd("syncengine", bytes, " (SYNCENGINE_ARENA_BYTES)"), bytes));
}

Arena::Arena(UniqueFd fd, size_t bytes)
    : file_(std::move(fd)), mapping_(file_.get(), bytes), heap_(kHeapBegin, bytes), inherited_{{0, bytes}} {
  header().magic = build_id();
}

int64_t Arena::offset_of(const void* data, size_t bytes) const {
  auto* memory = static_cast<const std::byte*>(data);
  bool inside = memory >= mapping_.data() && memory + bytes <= mapping_.data() + mapping_.bytes();
  if (!inside) return -1;
  int64_t offset = memory - mapping_.data();
  return any_severed_ && is_severed(static_cast<size_t>(offset), bytes) ? -1 : offset;
}

std::shared_ptr<void> Arena::allocate_tensor(size_t bytes) {
  reclaim_groups();
  size_t available = available_memory();
  if (bytes > available)
    throw Error(ErrorKind::InvalidUsage, "syncengine.empty: " + std::to_string(bytes) +
                                             " bytes of shared memory wanted, " + std::to_string(available) +
                                             " available on this machine (or in this cgroup)");
  size_t length = round_up(std::max<size_t>(bytes, 1), kPage);
  auto offset = heap_.allocate(length, length >= kHugePage ? kHugePage : kPage);
  if (!offset)
    throw Error(ErrorKind::InvalidUsage, "syncengine.empty: no room for " + std::to_string(bytes) +
                                             " bytes in an arena of " + std::to_string(this->bytes()) +
                                             "; raise SYNCENGINE_ARENA_BYTES");
  std::byte* memory = at(*offset);
  advise_huge_pages(memory, round_down(length, kHugePage));
  {
    std::lock_guard lock(mutex_);
    tensors_.emplace(*offset, length);
  }
  return {memory,
          [self = shared_from_this(), offset = *offset, length](void*) { self->release_tensor(offset, length); }};
}

void Arena::discard(std::byte* data, size_t bytes) const {
  if (madvise(data, bytes, forked_ ? MADV_DONTNEED : MADV_REMOVE) == 0) return;
  // The kernel spares pages that are locked (mlockall); punching a hole into the file frees them all the same.
  const auto offset = static_cast<size_t>(data - mapping_.data());
  if (forked_ || !discard_from_file({offset, offset + bytes})) std::memset(data, 0, bytes);
}

bool Arena::discard_from_file(Range range) const {
  return file_.is_there() && fallocate(file_.get(), FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE,
                                       static_cast<off_t>(range.begin), static_cast<off_t>(range.bytes())) == 0;
}

bool Arena::may_be_read(Range part) const {
  return std::ranges::any_of(held_, [part](const Held& held) { return part.meets(held.pages); });
}

std::vector<Range> Arena::give_back(Range range) {
  for (Range cut : severed_) {
    const Range part{std::max(cut.begin, range.begin), std::min(cut.end, range.end)};
    if (part.begin >= part.end) continue;
    if (!make_inaccessible(at(part.begin), part.bytes())) advise(at(part.begin), part.bytes(), MADV_DONTNEED);
    if (may_be_read(part))
      freed_.push_back(part);
    else
      discard_from_file(part);
  }
  std::vector<Range> rest = unsevered(range);
  for (Range part : rest) discard(at(part.begin), part.bytes());
  return rest;
}

void Arena::release_tensor(size_t offset, size_t bytes) {
  if (forked_) return discard(at(offset), bytes);
  std::lock_guard lock(mutex_);
  tensors_.erase(offset);
  for (Range part : give_back({offset, offset + bytes})) heap_.release(part.begin, part.bytes());
}

size_t Arena::allocate_group(size_t bytes) {
  reclaim_groups();
  auto offset = heap_.allocate(round_up(bytes, kPage), kPage);
  if (!offset)
    throw Error(ErrorKind::InvalidUsage, "no room for another communicator in an arena of " +
                                             std::to_string(this->bytes()) + " bytes; raise SYNCENGINE_ARENA_BYTES");
  return *offset;
}

void Arena::retire_group(size_t offset, size_t bytes, std::function<bool()> is_unused) {
  {
    std::lock_guard lock(mutex_);
    retired_.push_back({offset, round_up(bytes, kPage), std::move(is_unused)});
  }
  reclaim_groups();
}

void Arena::reclaim_groups() {
  std::lock_guard lock(mutex_);
  std::erase_if(retired_, [this](const RetiredGroup& group) {
    if (!group.is_unused()) return false;
    discard(at(group.offset), group.bytes);
    heap_.release(group.offset, group.bytes);
    std::erase_if(held_, [&](const Held& held) { return held.readers == group.offset; });
    return true;
  });
  std::erase_if(freed_, [this](Range part) {
    if (may_be_read(part)) return false;
    discard_from_file(part);
    return true;
  });
}

bool Arena::lies_in_tensor(size_t offset) const {
  auto after = tensors_.upper_bound(offset);
  if (after == tensors_.begin()) return false;
  const auto& [begin, bytes] = *std::prev(after);
  return offset < begin + bytes;
}

Pool* Arena::create_pool() {
  size_t reserved = round_up(bytes() / 2, kPage);
  auto offset = heap_.allocate(reserved, kHugePage);
  if (!offset) return nullptr;
  {
    std::lock_guard lock(mutex_);
    tensors_.emplace(*offset, 0);
  }
  header().pool_offset.store(*offset, std::memory_order_relaxed);
  header().pool_bytes.store(reserved, std::memory_order_release);  // release: the offset
  return &Pool::create(shared_from_this(), at(*offset), reserved);
}

std::string Arena::commit(const std::byte* pool, size_t bytes) {
  std::lock_guard lock(mutex_);
  size_t& committed = tensors_[static_cast<size_t>(pool - mapping_.data())];
  if (const size_t available = available_memory(); bytes - committed > available)
    return std::to_string(bytes - committed) + " more bytes of shared memory wanted for gradients, " +
           std::to_string(available) + " available on this machine (or in this cgroup)";
  committed = bytes;
  return {};
}

bool Arena::gives_up(const std::byte* block, size_t bytes) {
  const auto offset = static_cast<size_t>(block - mapping_.data());
  if (!any_severed_ || !is_severed(offset, bytes)) return false;
  std::lock_guard lock(mutex_);
  give_back({offset, offset + bytes});
  return true;
}

void Arena::sever_tensor(size_t offset, size_t bytes, size_t readers) {
  std::lock_guard lock(mutex_);
  if (bytes == 0 || !lies_in_tensor(offset)) return;
  const size_t end = offset + bytes, last = round_down(end, kPage);
  const Range pages{round_down(offset, kPage), round_up(end, kPage)};
  if (readers != 0) held_.push_back({pages, readers});
  for (Range part : unsevered(pages)) {
    for (Range piece = part; piece.begin < part.end; piece.begin = piece.end) {
      // The program may be writing to a page that is severed only in part: each such page is a piece of its own.
      std::byte* const own = piece.begin < offset ? at(offset) : piece.begin >= last ? at(end - 1) : nullptr;
      piece.end = own ? piece.begin + kPage : std::min(part.end, last);
      // If memory is short, the pages become inaccessible: lost content is better than content that a peer may change.
      if (!file_.make_private(mapping_.data(), piece, own) && !make_inaccessible(at(piece.begin), piece.bytes())) {
        const int code = errno;
        exposed = true;
        throw Error(ErrorKind::Aborted, std::string(kExposed) + ": " + std::strerror(code));
      }
      severed_.push_back(piece);
      any_severed_ = true;
      inherited_ = unsevered({0, this->bytes()});
    }
  }
}

std::vector<Range> Arena::unsevered(Range range) const {
  std::vector<Range> parts{range};
  for (Range cut : severed_) {
    std::vector<Range> left;
    for (Range part : parts) {
      if (part.begin < cut.begin) left.push_back({part.begin, std::min(part.end, cut.begin)});
      if (cut.end < part.end) left.push_back({std::max(part.begin, cut.end), part.end});
    }
    parts = std::move(left);
  }
  return parts;
}

bool Arena::is_severed(size_t offset, size_t bytes) const {
  std::lock_guard lock(mutex_);
  return std::ranges::any_of(severed_, [&](Range part) { return part.meets({offset, offset + bytes}); });
}

void Arena::become_forked() {
  if (forked_) return;  // a child's child inherits as usual
  forked_ = true;
  for (Range part : inherited_) file_.keep_writes(mapping_.data(), part);
  file_.reset();
}

void prepare_liveness(ArenaHeader& header) {
  pthread_mutexattr_t attributes;
  pthread_mutexattr_init(&attributes);
  pthread_mutexattr_setpshared(&attributes, PTHREAD_PROCESS_SHARED);
  pthread_mutexattr_setrobust(&attributes, PTHREAD_MUTEX_ROBUST);
  for (auto& mutex : header.alive) pthread_mutex_init(&mutex, &attributes);
  pthread_mutexattr_destroy(&attributes);
}

bool tells_of_deaths() {
  static const bool tells = [] {
    ArenaHeader header{};
    prepare_liveness(header);
    start_thread([&] { hold_all(header, 1); }).join();
    return found_dead(header, 0);
  }();
  return tells;
}

void hold_all(ArenaHeader& header, int watchers) {
  for (int watcher = 0; watcher < watchers; ++watcher) pthread_mutex_lock(&header.alive[watcher]);
}

void release_all(ArenaHeader& header, int watchers) {
  for (int watcher = 0; watcher < watchers; ++watcher) pthread_mutex_unlock(&header.alive[watcher]);
}

bool found_dead(ArenaHeader& header, int me) {
  pthread_mutex_t& mutex = header.alive[me];
  int result = pthread_mutex_trylock(&mutex);
  if (result == EBUSY) return false;
  if (result == EOWNERDEAD) pthread_mutex_consistent(&mutex);
  if (result == EOWNERDEAD || result == 0) pthread_mutex_unlock(&mutex);
  return result == EOWNERDEAD || result == ENOTRECOVERABLE;
}

}  // namespace syncengine::shm
