#include "cuda/device/memory.h"

#include <sys/mman.h>
#include <sys/random.h>

#include <cerrno>
#include <cstring>
#include <string>

#include "cuda/device/driver.h"
#include "cuda/device/kernels.h"
#include "cuda/shared_pages.h"

namespace syncengine::cuda {

namespace {

// The same in two ranks only if they are threads of one process, where exported memory can't be opened and need not be.
uint64_t process_token() {
  static const uint64_t token = [] {
    uint64_t value = 0;
    if (getrandom(&value, sizeof(value), 0) != sizeof(value)) throw_system_error("getrandom", errno);
    return value;
  }();
  return token;
}

struct Offer {
  uint64_t process = 0;
  uint64_t pointer = 0;
  int32_t device = 0;
  cudaUUID_t uuid{};
  cudaIpcMemHandle_t handle{};
};

std::string words(cudaError_t status) {
  cudaGetLastError();
  return cudaGetErrorName(status);
}

constexpr size_t kPatternWords = 1024;

uint32_t pattern(int rank, size_t i) { return static_cast<uint32_t>((i + 1) * 2654435761u) ^ (0xa5a50000u + rank); }

}  // namespace

UseDevice::UseDevice(int device) {
  int before = device;
  check(cudaGetDevice(&before), "asking for the current device");
  if (before == device) return;
  check(cudaSetDevice(device), "choosing a device");
  before_ = before;
}

UseDevice::~UseDevice() {
  if (before_ >= 0) cudaSetDevice(before_);
}

DeviceMemory::DeviceMemory(size_t bytes) : bytes_(bytes) {
  void* memory = nullptr;
  const cudaError_t status = cudaMalloc(&memory, bytes);
  if (status == cudaErrorMemoryAllocation) {
    cudaGetLastError();
    int device = -1;
    size_t free = 0, total = 0;
    cudaGetDevice(&device);
    cudaMemGetInfo(&free, &total);
    throw Error(ErrorKind::InvalidUsage, "CUDA: device " + std::to_string(device) + " has no memory for " +
                                             std::to_string(bytes) + " bytes (" + std::to_string(free) + " of " +
                                             std::to_string(total) +
                                             " are free; torch keeps what it has freed: torch.cuda.empty_cache())");
  }
  check(status, "taking device memory");
  data_ = static_cast<std::byte*>(memory);
}

DeviceMemory::~DeviceMemory() {
  if (data_ && !shared_) cudaFree(data_);
}

std::shared_ptr<void> hold(std::unique_ptr<DeviceMemory> memory, int device) {
  std::byte* data = memory->data();
  return {data, [memory = std::shared_ptr(std::move(memory)), device](void*) mutable {
            try {
              const UseDevice use(device);
              memory.reset();
            } catch (const Error&) {  // at exit CUDA may be gone, and the memory with it
              new auto(std::move(memory));
            }
          }};
}

PinnedMapping::PinnedMapping(void* host, size_t bytes) : host_(host) {
  check(cudaHostRegister(host, bytes, cudaHostRegisterMapped | cudaHostRegisterPortable), "pinning shared memory");
  void* device = nullptr;
  const cudaError_t status = cudaHostGetDevicePointer(&device, host, 0);
  if (status != cudaSuccess) cudaHostUnregister(host_);
  check(status, "mapping shared memory to the device");
  device_ = static_cast<std::byte*>(device);
}

PinnedMapping::~PinnedMapping() { cudaHostUnregister(host_); }

PinnedMemory::PinnedMemory(size_t bytes) : bytes_(bytes) {
  void* data = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  if (data == MAP_FAILED) throw_system_error("can't take " + std::to_string(bytes) + " bytes to be pinned", errno);
  data_ = static_cast<std::byte*>(data);
  try {
    pinned_.emplace(data, bytes);
  } catch (...) {
    munmap(data, bytes);
    throw;
  }
}

PinnedMemory::~PinnedMemory() {
  pinned_.reset();
  munmap(data_, bytes_);
}

PeerMemory::PeerMemory(Communicator& communicator, DeviceMemory& own, const std::function<void()>& interrupted) {
  Offer offer;
  offer.process = process_token();
  offer.pointer = reinterpret_cast<uint64_t>(own.data());
  check(cudaGetDevice(&offer.device), "asking for the current device");
  cudaDeviceProp properties;
  check(cudaGetDeviceProperties(&properties, offer.device), "asking for the device's UUID");
  offer.uuid = properties.uuid;
  const cudaError_t exported = cudaIpcGetMemHandle(&offer.handle, own.data());
  if (exported != cudaSuccess) why_ = "its memory can't be exported: " + words(exported);

  own.share();
  const auto offers = gather(communicator, offer, "exchanging device memory", interrupted);
  for (int rank = 0; rank < communicator.size(); ++rank) {
    const Offer& theirs = offers[rank];
    const bool same_device = std::memcmp(&theirs.uuid, &offer.uuid, sizeof(offer.uuid)) == 0;
    one_device_ &= same_device;
    void* memory = nullptr;
    if (theirs.process == offer.process) {
      memory = reinterpret_cast<void*>(theirs.pointer);
      if (!same_device) {
        const cudaError_t status = cudaDeviceEnablePeerAccess(theirs.device, 0);
        if (status != cudaSuccess && status != cudaErrorPeerAccessAlreadyEnabled) memory = nullptr;
        if (status != cudaSuccess && !memory) why_ = "rank " + std::to_string(rank) + ": " + words(status);
        if (status == cudaErrorPeerAccessAlreadyEnabled) cudaGetLastError();
      }
    } else {
      const cudaError_t status = cudaIpcOpenMemHandle(&memory, theirs.handle, cudaIpcMemLazyEnablePeerAccess);
      if (status == cudaSuccess) {
        opened_.push_back(memory);
      } else {
        memory = nullptr;
        why_ = "rank " + std::to_string(rank) + ": " + words(status);
      }
    }
    bases_.push_back(static_cast<std::byte*>(memory));
  }
}

PeerMemory::~PeerMemory() {
  for (void* memory : opened_) cudaIpcCloseMemHandle(memory);
}

std::string prove_access(Communicator& communicator, const PeerMemory& memory,
                         const std::function<void()>& interrupted) {
  const int rank = communicator.rank(), size = communicator.size();
  constexpr size_t kBytes = kPatternWords * sizeof(uint32_t);
  std::vector<uint32_t> wanted(kPatternWords), found(kPatternWords);
  auto fill = [&](int whose) {
    for (size_t i = 0; i < kPatternWords; ++i) wanted[i] = pattern(whose, i);
  };
  std::byte* own = memory.bases()[rank];
  fill(rank);
  check(cudaMemcpy(own, wanted.data(), kBytes, cudaMemcpyHostToDevice), "writing a pattern");
  uint64_t unreachable = 0;
  gather(communicator, unreachable, "proving peer access", interrupted);  // everybody has written
  for (int peer = 0; peer < size; ++peer) {
    if (!memory.bases()[peer]) {
      unreachable |= uint64_t{1} << peer;
      continue;
    }
    CopyArgs args{.pieces = 1};
    args.sources[0] = memory.bases()[peer];
    args.destinations[0] = own + kBytes;
    args.bytes[0] = kBytes;
    launch_copy(args, 1, cudaStreamPerThread);
    check(cudaStreamSynchronize(cudaStreamPerThread), "reading a peer's pattern");
    check(cudaMemcpy(found.data(), own + kBytes, kBytes, cudaMemcpyDeviceToHost), "reading a pattern");
    fill(peer);
    if (found != wanted) unreachable |= uint64_t{1} << peer;
  }
  std::string text;
  const auto all = gather(communicator, unreachable, "proving peer access", interrupted);
  for (int reader = 0; reader < size; ++reader)
    for (int peer = 0; peer < size; ++peer)
      if (all[reader] >> peer & 1)
        text += (text.empty() ? "rank " : ", rank ") + std::to_string(reader) + " can't read the memory of rank " +
                std::to_string(peer);
  return text;
}

}  // namespace syncengine::cuda
