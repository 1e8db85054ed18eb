// Device memory between processes: a handle says which process has the file, under which number.
#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cstring>
#include <map>
#include <mutex>
#include <string>

#include "machine.h"

namespace software {

namespace {

struct Handle {
  uint64_t nonce;
  int pid, fd;
};
static_assert(sizeof(Handle) <= sizeof(cudaIpcMemHandle_t));

struct Imported {
  uint64_t nonce;
  Header* header;
  size_t mapped;
  int uses;
};
std::mutex mutex;
auto& all = *new std::map<std::byte*, Imported>;

Header* map_header(int fd, size_t bytes, int flags) {
  void* address = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, flags, fd, 0);
  return address == MAP_FAILED ? nullptr : static_cast<Header*>(address);
}

}  // namespace

}  // namespace software

using namespace software;

cudaError_t cudaIpcGetMemHandle(cudaIpcMemHandle_t* result, void* address) {
  const auto memory = memory_at(address);
  if (!memory) return fail(cudaErrorInvalidValue);
  if (peers() == Peers::Unshared) return fail(cudaErrorNotSupported);
  const Handle handle{memory->header->nonce, getpid(), memory->fd};
  std::memset(result, 0, sizeof(*result));
  std::memcpy(result, &handle, sizeof(handle));
  return cudaSuccess;
}

cudaError_t cudaIpcOpenMemHandle(void** address, cudaIpcMemHandle_t given, unsigned flags) {
  if (spoils_capture()) return fail(cudaErrorStreamCaptureUnsupported);
  if (flags != cudaIpcMemLazyEnablePeerAccess) return fail(cudaErrorInvalidValue);
  Handle handle;
  std::memcpy(&handle, &given, sizeof(handle));
  if (handle.pid == getpid()) return fail(cudaErrorDeviceUninitialized);
  std::lock_guard lock(mutex);
  for (auto& [data, imported] : all)
    if (imported.nonce == handle.nonce) return ++imported.uses, *address = data, cudaSuccess;
  const std::string path = "/proc/" + std::to_string(handle.pid) + "/fd/" + std::to_string(handle.fd);
  const int fd = open(path.c_str(), O_RDWR | O_CLOEXEC);
  if (fd < 0) return fail(cudaErrorInvalidResourceHandle);
  Header* header = map_header(fd, 4096, MAP_SHARED);
  if (!header || header->nonce != handle.nonce) return close(fd), fail(cudaErrorInvalidResourceHandle);
  const size_t mapped = mapped_bytes(header->bytes);
  const bool other_device = header->device != visible_devices()[current_device()];
  munmap(header, 4096);
  if (other_device && peers() == Peers::Refused) return close(fd), fail(cudaErrorPeerAccessUnsupported);
  header = map_header(fd, mapped, MAP_SHARED);
  if (!header) return close(fd), fail(cudaErrorMapBufferObjectFailed);
  __atomic_fetch_add(&header->opened, 1, __ATOMIC_ACQ_REL);
  std::byte* data = data_of(header);
  if (other_device && peers() != Peers::Allowed) {  // the peer's memory, of which writes make copies; or something else
    const int flags = MAP_PRIVATE | MAP_FIXED | (peers() == Peers::Lying ? MAP_ANONYMOUS : 0);
    mmap(data, mapped - 3 * 4096, PROT_READ | PROT_WRITE, flags, fd, 2 * 4096);
  }
  close(fd);
  add_range({data, header->bytes, Kind::Imported, current_device()});
  all[data] = {handle.nonce, header, mapped, 1};
  *address = data;
  return cudaSuccess;
}

cudaError_t cudaIpcCloseMemHandle(void* address) {
  if (spoils_capture()) return fail(cudaErrorStreamCaptureUnsupported);
  synchronize(current_device());
  std::lock_guard lock(mutex);
  auto found = all.find(static_cast<std::byte*>(address));
  if (found == all.end()) return fail(cudaErrorInvalidValue);
  if (--found->second.uses > 0) return cudaSuccess;
  __atomic_fetch_sub(&found->second.header->opened, 1, __ATOMIC_ACQ_REL);
  retire(found->first);
  all.erase(found);
  return cudaSuccess;
}
