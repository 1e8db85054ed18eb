#include "transport/shm/arena.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "base/alignment.h"
#include "base/error.h"
#include "base/resources.h"
#include "transport/shm/fork_guard.h"

namespace syncengine::shm {

namespace {

constexpr size_t kHugePage = 2 << 20;
constexpr int kSeals = F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL;
constexpr size_t kHeapBegin = round_up(sizeof(ArenaHeader), kPage);

UniqueFd create_sealed(size_t bytes) {
  UniqueFd fd(memfd_create("syncengine", MFD_CLOEXEC | MFD_ALLOW_SEALING));
  if (!fd) throw_system_error("can't create shared memory", errno);
  if (ftruncate(fd.get(), static_cast<off_t>(bytes)) != 0)
    throw_system_error("can't size shared memory to " + std::to_string(bytes) + " bytes (SYNCENGINE_ARENA_BYTES)",
                       errno);
  if (fcntl(fd.get(), F_ADD_SEALS, kSeals) != 0) throw_system_error("can't seal shared memory", errno);
  return fd;
}

Mapping map_arena(int fd, size_t bytes) {
  try {
    return Mapping(fd, bytes);
  } catch (const Error& error) {
    throw Error(error.kind(), std::string(error.what()) + "; lower SYNCENGINE_ARENA_BYTES");
  }
}

}  // namespace

PeerArena::PeerArena(int fd, size_t bytes) {
  struct stat status{};
  // Sealed, or the peer could shrink it under us: a SIGBUS instead of an error.
  bool sound = (fcntl(fd, F_GET_SEALS) & kSeals) == kSeals && fstat(fd, &status) == 0 &&
               static_cast<size_t>(status.st_size) == bytes && bytes > kHeapBegin;
  if (!sound) throw Error(ErrorKind::InvalidUsage, "a peer sent shared memory of another size, or unsealed");
  mapping_ = map_arena(fd, bytes);
  if (header().magic != kMagic)
    throw Error(ErrorKind::InvalidUsage,
                "a peer's shared memory has another layout: do all ranks run the same syncengine?");
  ForkGuard::add(this);
}

PeerArena::~PeerArena() { ForkGuard::remove(this); }

std::byte* PeerArena::at(uint64_t offset, size_t bytes) const {
  if (offset > mapping_.bytes() || bytes > mapping_.bytes() - offset)
    throw Error(ErrorKind::InvalidUsage, "a peer published an offset outside its arena");
  return mapping_.data() + offset;
}

std::shared_ptr<Arena> Arena::create(size_t bytes) {
  bytes = round_up(bytes, kPage);
  return std::shared_ptr<Arena>(new Arena(create_sealed(bytes), bytes));
}

Arena::Arena(UniqueFd fd, size_t bytes)
    : fd_(std::move(fd)), mapping_(map_arena(fd_.get(), bytes)), heap_(kHeapBegin, bytes) {
  header().magic = kMagic;
  ForkGuard::add(this);
}

Arena::~Arena() { ForkGuard::remove(this); }

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
  if (length >= kHugePage) madvise(memory, length / kHugePage * kHugePage, MADV_HUGEPAGE);
  {
    std::lock_guard lock(mutex_);
    tensors_.emplace(*offset, TensorMemory{length});
  }
  return {memory,
          [self = shared_from_this(), offset = *offset, length](void*) { self->release_tensor(offset, length); }};
}

void Arena::release_tensor(size_t offset, size_t bytes) {
  if (forked_) return;
  std::lock_guard lock(mutex_);
  if (severed({offset, offset + bytes})) return;  // private memory now, and for ever: no use for a new tensor
  tensors_.erase(offset);
  madvise(at(offset), bytes, MADV_REMOVE);
  heap_.release(offset, bytes);
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
    madvise(at(group.offset), group.bytes, MADV_REMOVE);
    heap_.release(group.offset, group.bytes);
    return true;
  });
}

const std::pair<const size_t, Arena::TensorMemory>* Arena::find_tensor(size_t offset) const {
  auto after = tensors_.upper_bound(offset);
  if (after == tensors_.begin()) return nullptr;
  const auto& tensor = *std::prev(after);
  return offset < tensor.first + tensor.second.bytes ? &tensor : nullptr;
}

Pool* Arena::create_pool() {
  size_t reserved = round_up(bytes() / 2, kPage);
  auto offset = heap_.allocate(reserved, kHugePage);
  if (!offset) return nullptr;
  {
    std::lock_guard lock(mutex_);
    tensors_.emplace(*offset, TensorMemory{.bytes = 0, .pool = true});
  }
  auto commit = [this, offset = *offset](size_t bytes) {
    std::lock_guard lock(mutex_);
    size_t& committed = tensors_[offset].bytes;
    if (bytes - committed > available_memory()) return false;
    committed = bytes;
    return true;
  };
  auto lost = [this](const void* block, size_t bytes) {
    return any_severed_ && is_severed(static_cast<const std::byte*>(block) - mapping_.data(), bytes);
  };
  return &Pool::create({.data = at(*offset),
                        .bytes = reserved,
                        .keepalive = shared_from_this(),
                        .commit = commit,
                        .lost = lost,
                        .discard = [](void* data, size_t bytes) { madvise(data, bytes, MADV_REMOVE); }});
}

void Arena::sever_tensor(size_t offset, size_t bytes) {
  std::lock_guard lock(mutex_);
  const auto* tensor = find_tensor(offset);
  if (!tensor) return;
  auto [begin, memory] = *tensor;
  Range range{begin, begin + memory.bytes};
  if (memory.pool) range = {offset / kPage * kPage, round_up(offset + bytes, kPage)};
  if (!memory.pool && severed(range)) return;
  // Short of memory: better no content than somebody else's.
  size_t length = range.end - range.begin;
  if (!make_private(at(range.begin), length)) make_inaccessible(at(range.begin), length);
  severed_.push_back(range);
  any_severed_ = true;
}

bool Arena::is_severed(size_t offset, size_t bytes) const {
  std::lock_guard lock(mutex_);
  return severed({offset, offset + bytes});
}

bool Arena::severed(Range range) const {
  return std::any_of(severed_.begin(), severed_.end(),
                     [&](Range other) { return range.begin < other.end && other.begin < range.end; });
}

}  // namespace syncengine::shm
