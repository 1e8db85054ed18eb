#include <fcntl.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <map>
#include <mutex>

#include "machine.h"

namespace software {

namespace {

constexpr size_t kPage = 4096, kTotal = size_t{16} << 30;
constexpr int kGuard = 0xa5, kPoison = 0xcb;
constexpr size_t kPoisoned = 1 << 20;  // at both ends of what is larger

std::mutex mutex;
auto& ranges = *new std::map<std::byte*, Range>;
auto& allocations = *new std::map<std::byte*, Memory>;
std::map<int, size_t>& used = *new std::map<int, size_t>;

bool is_guard(const std::byte* begin, const std::byte* end) {
  return std::all_of(begin, end, [](std::byte byte) { return byte == std::byte{kGuard}; });
}

std::string text_of(const void* address) {
  char text[32];
  std::snprintf(text, sizeof(text), "%p", address);
  return text;
}

// Whether all `bytes` lie in device memory that the process may use.
bool is_device_memory(const void* address, size_t bytes) {
  const auto range = find(address);
  if (!range || range->kind == Kind::PinnedHost) return false;
  if (range->kind == Kind::Gone) undefined("a copy of memory that was given back, " + text_of(address));
  return static_cast<const std::byte*>(address) + bytes <= range->begin + range->bytes;
}

bool copies(void* to, const void* from, size_t bytes, cudaMemcpyKind kind) {
  const bool to_device = is_device_memory(to, bytes), from_device = is_device_memory(from, bytes);
  switch (kind) {
    case cudaMemcpyHostToDevice: return to_device && !from_device;
    case cudaMemcpyDeviceToHost: return from_device && !to_device;
    case cudaMemcpyDeviceToDevice: return to_device && from_device;
    default: return true;
  }
}

}  // namespace

void add_range(const Range& range) {
  std::lock_guard lock(mutex);
  ranges[range.begin] = range;
}

void forget(std::byte* begin) {
  std::lock_guard lock(mutex);
  ranges.erase(begin);
}

void retire(std::byte* begin) {
  std::lock_guard lock(mutex);
  Range& range = ranges.at(begin);
  const size_t bytes = (range.bytes + kPage - 1) / kPage * kPage;
  mmap(begin, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0);
  range.kind = Kind::Gone;
}

std::unique_ptr<Range> find(const void* address) {
  std::lock_guard lock(mutex);
  auto after = ranges.upper_bound(static_cast<std::byte*>(const_cast<void*>(address)));
  if (after == ranges.begin()) return nullptr;
  const Range& range = std::prev(after)->second;
  if (static_cast<const std::byte*>(address) >= range.begin + range.bytes) return nullptr;
  return std::make_unique<Range>(range);
}

void check_argument(uint64_t word, int device) {
  const auto range = find(reinterpret_cast<void*>(word));
  if (!range) return;
  const std::string which = "a kernel gets " + text_of(reinterpret_cast<void*>(word));
  if (range->kind == Kind::Gone) undefined(which + ", which was given back");
  if (range->kind == Kind::PinnedHost) undefined(which + ", the host's address of pinned memory, not the device's");
  if (range->kind == Kind::Device && !reaches(device, range->device))
    undefined(which + ", memory of a device whose peer access was not enabled");
}

size_t mapped_bytes(size_t bytes) { return (bytes + kPage - 1) / kPage * kPage + 3 * kPage; }
std::byte* data_of(Header* header) { return reinterpret_cast<std::byte*>(header) + 2 * kPage; }

std::unique_ptr<Memory> memory_at(const void* address) {
  std::lock_guard lock(mutex);
  auto found = allocations.find(static_cast<std::byte*>(const_cast<void*>(address)));
  return found == allocations.end() ? nullptr : std::make_unique<Memory>(found->second);
}

}  // namespace software

using namespace software;

cudaError_t cudaMalloc(void** result, size_t bytes) {
  *result = nullptr;
  if (spoils_capture()) return fail(cudaErrorStreamCaptureUnsupported);
  if (bytes == 0) return cudaSuccess;
  const int device = current_device();
  std::unique_lock lock(mutex);
  if (bytes > kTotal - used[device]) return fail(cudaErrorMemoryAllocation);
  used[device] += bytes;
  lock.unlock();
  Memory memory{.fd = memfd_create("software-cuda", MFD_CLOEXEC), .device = device, .mapped = mapped_bytes(bytes)};
  if (memory.fd < 0 || ftruncate(memory.fd, static_cast<off_t>(memory.mapped)) != 0)
    return fail(cudaErrorMemoryAllocation);
  void* address = mmap(nullptr, memory.mapped, PROT_READ | PROT_WRITE, MAP_SHARED, memory.fd, 0);
  if (address == MAP_FAILED) return fail(cudaErrorMemoryAllocation);
  memory.header = static_cast<Header*>(address);
  memory.header->bytes = bytes;
  memory.header->device = visible_devices()[device];
  if (getrandom(&memory.header->nonce, sizeof(uint64_t), 0) < 0) return fail(cudaErrorMemoryAllocation);
  memory.data = data_of(memory.header);
  std::memset(static_cast<std::byte*>(address) + kPage, kGuard, kPage);
  std::memset(memory.data, kPoison, std::min(bytes, kPoisoned));
  if (bytes > kPoisoned) std::memset(memory.data + bytes - kPoisoned, kPoison, kPoisoned);
  std::memset(memory.data + bytes, kGuard, memory.mapped - 2 * kPage - bytes);
  add_range({memory.data, bytes, Kind::Device, device});
  lock.lock();
  allocations[memory.data] = memory;
  *result = memory.data;
  return cudaSuccess;
}

cudaError_t cudaFree(void* address) {
  if (spoils_capture()) return fail(cudaErrorStreamCaptureUnsupported);
  if (!address) return cudaSuccess;
  const auto memory = memory_at(address);
  if (!memory) return fail(cudaErrorInvalidValue);
  synchronize(memory->device);
  const std::byte* end = reinterpret_cast<std::byte*>(memory->header) + memory->mapped;
  if (!is_guard(memory->data - kPage, memory->data)) undefined("a write in front of " + text_of(address));
  if (!is_guard(memory->data + memory->header->bytes, end)) undefined("a write behind " + text_of(address));
  if (__atomic_load_n(&memory->header->opened, __ATOMIC_ACQUIRE) > 0)
    undefined("memory is given back that another process has open, " + text_of(address));
  {
    std::lock_guard lock(mutex);
    used[memory->device] -= memory->header->bytes;
    allocations.erase(memory->data);
  }
  retire(memory->data);
  munmap(memory->header, 2 * kPage);
  close(memory->fd);
  return cudaSuccess;
}

cudaError_t cudaMemGetInfo(size_t* free, size_t* total) {
  std::lock_guard lock(mutex);
  *total = kTotal;
  *free = kTotal - used[current_device()];
  return cudaSuccess;
}

cudaError_t cudaMemsetAsync(void* address, int value, size_t bytes, cudaStream_t handle) {
  const auto stream = stream_of(handle);
  if (!stream) return fail(cudaErrorInvalidResourceHandle);
  if (!is_device_memory(address, bytes)) return fail(cudaErrorInvalidValue);
  enqueue(stream, [=] { std::memset(address, value, bytes); });
  return cudaSuccess;
}

cudaError_t cudaMemcpy(void* to, const void* from, size_t bytes, cudaMemcpyKind kind) {
  if (spoils_capture()) return fail(cudaErrorStreamCaptureUnsupported);
  if (!copies(to, from, bytes, kind)) return fail(cudaErrorInvalidValue);
  run_and_wait(stream_of(nullptr), [=] { std::memcpy(to, from, bytes); });
  return cudaSuccess;
}

// Pageable host memory: what goes to the device is read before the call returns, what comes from it is there when it
// returns.
cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t bytes, cudaMemcpyKind kind, cudaStream_t handle) {
  const auto stream = stream_of(handle);
  if (!stream) return fail(cudaErrorInvalidResourceHandle);
  if (!copies(to, from, bytes, kind)) return fail(cudaErrorInvalidValue);
  const auto host = kind == cudaMemcpyHostToDevice ? find(from) : kind == cudaMemcpyDeviceToHost ? find(to) : nullptr;
  const bool pageable = !host && kind != cudaMemcpyDeviceToDevice;
  cudaStreamCaptureStatus capture = cudaStreamCaptureStatusNone;
  cudaStreamIsCapturing(handle, &capture);
  if (!pageable || capture != cudaStreamCaptureStatusNone) {
    enqueue(stream, [=] { std::memcpy(to, from, bytes); });
  } else if (kind == cudaMemcpyHostToDevice) {
    const auto* begin = static_cast<const std::byte*>(from);
    enqueue(stream, [to, content = std::vector<std::byte>(begin, begin + bytes)] {
      std::memcpy(to, content.data(), content.size());
    });
  } else {
    run_and_wait(stream, [=] { std::memcpy(to, from, bytes); });
  }
  return cudaSuccess;
}
