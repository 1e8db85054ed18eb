#include "transport/shm/private_copy.h"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <utility>

namespace syncengine::shm {

// Neither mincore() nor the page map will do: both take what was swapped out for a hole.
std::vector<Range> pages_in(int file, Range range) {
  std::vector<Range> pages;
  for (size_t position = range.begin; position < range.end;) {
    off_t data = lseek(file, static_cast<off_t>(position), SEEK_DATA);
    if (data < 0 && errno == ENXIO) break;  // a hole until the end
    off_t hole = data < 0 ? -1 : lseek(file, data, SEEK_HOLE);
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

}  // namespace syncengine::shm
