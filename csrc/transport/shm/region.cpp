#include "transport/shm/region.h"

#include <string>

#include "base/build_id.h"
#include "base/error.h"
#include "base/resources.h"

namespace syncengine::shm {

std::shared_ptr<Region> Region::create(size_t bytes) {
  const size_t whole = round_up(kHead + bytes, kPage), available = available_memory();
  if (whole > available)
    throw Error(ErrorKind::InvalidUsage, std::to_string(whole) + " bytes of shared memory wanted, " +
                                             std::to_string(available) +
                                             " available on this machine (or in this cgroup)");
  std::shared_ptr<Region> region(new Region(create_sealed_memfd("syncengine-common", whole), whole));
  region->header().magic = build_id();
  region->header().bytes = whole - kHead;
  return region;
}

std::shared_ptr<Region> Region::open(UniqueFd fd) {
  if (const size_t whole = sealed_size(fd.get()); whole >= kHead) {
    std::shared_ptr<Region> region(new Region(std::move(fd), whole));
    if (region->header().magic == build_id() && region->header().bytes == whole - kHead) return region;
  }
  throw Error(ErrorKind::InvalidUsage, "a peer sent something else than memory that ranks have in common");
}

Region::Region(UniqueFd fd, size_t bytes) : file_(std::move(fd)), mapping_(file_.get(), bytes) {
  advise_huge_pages(mapping_.data(), bytes);
}

std::byte* Region::at(size_t offset, size_t bytes) const {
  if (offset > this->bytes() || bytes > this->bytes() - offset)
    throw Error(ErrorKind::InvalidUsage, "offset " + std::to_string(offset) + " and " + std::to_string(bytes) +
                                             " bytes are not in a region of " + std::to_string(this->bytes()));
  return mapping_.data() + kHead + offset;
}

bool Region::decide(uint64_t number, bool proceeds) {
  auto& decision = header().decision;
  const uint64_t mine = 2 * number + (proceeds ? 1 : 0);
  uint64_t current = decision.load(std::memory_order_acquire);
  while (current < 2 * number) {
    if (decision.compare_exchange_weak(current, mine, std::memory_order_acq_rel)) return proceeds;
  }
  return current == 2 * number + 1;
}

// The store releases what this rank has written; completed() acquires it for whoever finds the update complete.
void Region::complete(int rank, uint64_t number) {
  header().done[rank].update.store(number, std::memory_order_release);
}

std::vector<uint64_t> Region::completed(int ranks) const {
  std::vector<uint64_t> updates;
  for (int rank = 0; rank < ranks; ++rank)
    updates.push_back(header().done[rank].update.load(std::memory_order_acquire));
  return updates;
}

void Region::tear(uint64_t number) {
  uint64_t none = 0;
  header().torn.compare_exchange_strong(none, number, std::memory_order_acq_rel);
}

bool Region::detach() {
  std::lock_guard lock(mutex_);
  if (!shared_) return true;
  const Range whole{0, mapping_.bytes()};
  size_t bytes = 0;
  for (Range pages : file_.pages_in(whole)) bytes += pages.bytes();
  if (bytes > available_memory() || !file_.make_private(mapping_.data(), whole)) return false;
  shared_ = false;
  file_.reset();
  return true;
}

void Region::become_forked() {
  if (!shared_) return;  // private memory is inherited as usual
  file_.keep_writes(mapping_.data(), {0, mapping_.bytes()});
  shared_ = false;
  file_.reset();
}

}  // namespace syncengine::shm
