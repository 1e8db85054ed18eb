// Pinned host memory. The device sees it at another address than the host, as not every device can use the host's.
#include <sys/mman.h>

#include <cinttypes>
#include <cstdio>
#include <cstring>
#include <map>
#include <mutex>

#include "machine.h"

namespace software {

namespace {

constexpr size_t kPage = 4096;

struct Pinned {
  size_t bytes;
  std::byte* alias;
  bool mapped;
};
std::mutex mutex;
auto& all = *new std::map<std::byte*, Pinned>;

// How the page at `address` is mapped.
struct Pages {
  bool mapped = false, shared = false;
};
Pages pages_at(const std::byte* address) {
  std::FILE* maps = std::fopen("/proc/self/maps", "r");
  if (!maps) return {};
  Pages found;
  char line[512];
  while (std::fgets(line, sizeof(line), maps)) {
    uint64_t begin, end;
    char modes[5];
    if (std::sscanf(line, "%" SCNx64 "-%" SCNx64 " %4s", &begin, &end, modes) != 3) continue;
    const auto at = reinterpret_cast<uint64_t>(address);
    if (at >= begin && at < end) found = {.mapped = true, .shared = modes[3] == 's'};
  }
  std::fclose(maps);
  return found;
}

}  // namespace

}  // namespace software

using namespace software;

cudaError_t cudaHostRegister(void* host, size_t bytes, unsigned flags) {
  if (spoils_capture()) return fail(cudaErrorStreamCaptureUnsupported);
  constexpr unsigned kKnown =
      cudaHostRegisterPortable | cudaHostRegisterMapped | cudaHostRegisterIoMemory | cudaHostRegisterReadOnly;
  auto* begin = static_cast<std::byte*>(host);
  if (!host || bytes == 0 || (flags & ~kKnown)) return fail(cudaErrorInvalidValue);
  std::lock_guard lock(mutex);
  for (const auto& [other, pinned] : all)
    if (begin < other + pinned.bytes && other < begin + bytes) return fail(cudaErrorHostMemoryAlreadyRegistered);
  const Pages pages = pages_at(begin);
  if (!pages.mapped || !pages_at(begin + bytes - 1).mapped) return fail(cudaErrorInvalidValue);
  if (!pages.shared || reinterpret_cast<uint64_t>(host) % kPage != 0)
    undefined("this software device pins whole pages of shared memory only");
  void* alias = mremap(host, 0, bytes, MREMAP_MAYMOVE);  // a second mapping of the same pages
  if (alias == MAP_FAILED) return fail(cudaErrorMemoryAllocation);
  const Pinned pinned{bytes, static_cast<std::byte*>(alias), (flags & cudaHostRegisterMapped) != 0};
  all[begin] = pinned;
  add_range({begin, bytes, Kind::PinnedHost, current_device()});
  add_range({pinned.alias, bytes, Kind::PinnedDevice, current_device(), (flags & cudaHostRegisterPortable) != 0});
  return cudaSuccess;
}

cudaError_t cudaHostGetDevicePointer(void** device, void* host, unsigned flags) {
  if (flags != 0) return fail(cudaErrorInvalidValue);
  std::lock_guard lock(mutex);
  auto after = all.upper_bound(static_cast<std::byte*>(host));
  if (after == all.begin()) return fail(cudaErrorInvalidValue);
  const auto& [begin, pinned] = *std::prev(after);
  const size_t offset = static_cast<std::byte*>(host) - begin;
  if (offset >= pinned.bytes || !pinned.mapped) return fail(cudaErrorInvalidValue);
  *device = pinned.alias + offset;
  return cudaSuccess;
}

cudaError_t cudaHostUnregister(void* host) {
  if (spoils_capture()) return fail(cudaErrorStreamCaptureUnsupported);
  synchronize(current_device());
  std::lock_guard lock(mutex);
  auto found = all.find(static_cast<std::byte*>(host));
  if (found == all.end()) return fail(cudaErrorHostMemoryNotRegistered);
  retire(found->second.alias);
  forget(found->first);
  all.erase(found);
  return cudaSuccess;
}
