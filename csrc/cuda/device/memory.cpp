#include "cuda/device/memory.h"

#include <algorithm>
#include <cstring>
#include <map>
#include <utility>

#include "cuda/device/stream.h"
#include "cuda/shared_pages.h"
#include "transport/tcp/address.h"

namespace syncengine::cuda {

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
  check(cudaGetDevice(&device_), "asking for the current device");
  void* memory = nullptr;
  const cudaError_t status = cudaMalloc(&memory, bytes);
  if (status == cudaErrorMemoryAllocation) {
    cudaGetLastError();
    size_t free = 0, total = 0;
    cudaMemGetInfo(&free, &total);
    throw Error(ErrorKind::InvalidUsage, "CUDA: device " + std::to_string(device_) + " has no memory for " +
                                             std::to_string(bytes) + " bytes (" + std::to_string(free) + " of " +
                                             std::to_string(total) +
                                             " are free; torch keeps what it has freed: torch.cuda.empty_cache())");
  }
  check(status, "taking device memory");
  data_ = static_cast<std::byte*>(memory);
}

DeviceMemory::~DeviceMemory() {
  if (shared_) return;
  try {
    const UseDevice use(device_);
    cudaFree(data_);
  } catch (const Error&) {  // at exit CUDA may be gone, and the memory with it
  }
}

PinnedMemory::PinnedMemory(Mapping memory) : memory_(std::move(memory)) {
  void* const host = memory_.data();
  check(cudaHostRegister(host, memory_.bytes(), cudaHostRegisterMapped | cudaHostRegisterPortable),
        "pinning shared memory");
  void* device = nullptr;
  const cudaError_t status = cudaHostGetDevicePointer(&device, host, 0);
  if (status != cudaSuccess) cudaHostUnregister(host);
  check(status, "mapping shared memory to the device");
  on_device_ = static_cast<std::byte*>(device);
}

PinnedMemory::PinnedMemory(size_t bytes)
    : PinnedMemory(Mapping(create_sealed_memfd("syncengine-pinned", bytes).get(), bytes)) {}

void PinnedMemory::unpin() {
  if (std::exchange(on_device_, nullptr)) cudaHostUnregister(memory_.data());
}

std::shared_ptr<CUstream_st> make_stream() {
  cudaStream_t made = nullptr;
  check(cudaStreamCreateWithFlags(&made, cudaStreamNonBlocking), "making a stream");
  return {made, cudaStreamDestroy};
}

namespace {

constexpr const char* kProving = "proving peer access";

uint64_t random_number() {
  uint64_t value = 0;
  tcp::random_bytes(sizeof(value)).copy(reinterpret_cast<char*>(&value), sizeof(value));
  return value;
}

struct Offer {
  uint64_t process;  // a number that two ranks share only if they are threads of one process
  uint64_t pointer;
  uint64_t seed;  // of the pattern, so that this rank's old memory, mapped again, has another one
  int32_t device;
  cudaUUID_t uuid;
  cudaError_t exported;
  cudaIpcMemHandle_t handle;
};

// The results of one rank's tries to reach each peer.
struct Findings {
  cudaError_t opened[kMaxRanks] = {};  // opening the peer's memory
  bool misread[kMaxRanks] = {};        // the own kernel did not read the peer's pattern
  bool missed[kMaxRanks] = {};         // the peer's kernel did not write its pattern here
};

bool same_device(const Offer& a, const Offer& b) { return std::memcmp(&a.uuid, &b.uuid, sizeof(a.uuid)) == 0; }

ProofArea::Row pattern(uint64_t seed) {
  ProofArea::Row row;
  for (size_t i = 0; i < row.size(); ++i) row[i] = static_cast<uint32_t>((seed + i + 1) * 0x9e3779b97f4a7c15u >> 32);
  return row;
}

// Opens a peer's memory; within one process, where that fails, takes its address. `memory` stays null on errors.
cudaError_t open(const Offer& own, const Offer& theirs, std::shared_ptr<void>& memory) {
  if (theirs.process == own.process) {
    cudaError_t status = same_device(own, theirs) ? cudaSuccess : cudaDeviceEnablePeerAccess(theirs.device, 0);
    if (status == cudaErrorPeerAccessAlreadyEnabled) status = cudaSuccess;
    if (status == cudaSuccess) memory = {reinterpret_cast<void*>(theirs.pointer), [](void*) {}};
    return status;
  }
  if (theirs.exported != cudaSuccess) return theirs.exported;
  void* opened = nullptr;
  const cudaError_t status = cudaIpcOpenMemHandle(&opened, theirs.handle, cudaIpcMemLazyEnablePeerAccess);
  if (status == cudaSuccess) memory = {opened, cudaIpcCloseMemHandle};
  return status;
}

void copy_and_wait(void* to, const void* from, cudaMemcpyKind kind, cudaStream_t stream) {
  check(cudaMemcpyAsync(to, from, sizeof(ProofArea), kind, stream), "copying a pattern");
  check(cudaStreamSynchronize(stream), "copying a pattern");
}

// Reads each peer's pattern, and writes the own one to it. Peers whose base is null are left out.
void cross(const std::vector<std::byte*>& bases, int rank, cudaStream_t stream) {
  auto area = [&](size_t peer) { return reinterpret_cast<ProofArea*>(bases[peer]); };
  StreamSteps steps(stream);
  Copies reads(steps), writes(steps);
  for (size_t peer = 0; peer < bases.size(); ++peer) {
    if (!bases[peer]) continue;
    reads.add(&area(rank)->read[peer], &area(peer)->own, sizeof(ProofArea::Row));
    writes.add(&area(peer)->written[rank], &area(rank)->own, sizeof(ProofArea::Row));
  }
  reads.flush();
  writes.flush();
  check(cudaStreamSynchronize(stream), "reading and writing peers' memory");
}

std::string text_of(const std::vector<Findings>& all, const std::vector<int>& names) {
  std::map<std::string, std::string> texts;  // by reason
  for (size_t rank = 0; rank < all.size(); ++rank) {
    std::map<std::string, std::string> peers;
    for (size_t peer = 0; peer < all.size(); ++peer) {
      const cudaError_t opened = all[rank].opened[peer];
      const std::string why = opened != cudaSuccess     ? cudaGetErrorName(opened)
                              : all[rank].misread[peer] ? "it reads something else there"
                              : all[peer].missed[rank]  ? "what it writes does not arrive"
                                                        : "";
      if (!why.empty()) peers[why] += (peers[why].empty() ? "" : ", ") + std::to_string(names[peer]);
    }
    for (const auto& [why, whose] : peers)
      texts[why] += (texts[why].empty() ? "rank " : "; rank ") + std::to_string(names[rank]) +
                    (texts[why].empty() ? " can't use the memory of rank " : " that of rank ") + whose;
  }
  std::string text;
  for (const auto& [why, who] : texts) text += (text.empty() ? "" : ". ") + who + ": " + why;
  return text;
}

}  // namespace

PeerMemory::PeerMemory(Communicator& communicator, DeviceMemory& own, const std::function<void()>& interrupted) {
  static const uint64_t process = random_number();
  const int rank = communicator.rank(), size = communicator.size();
  Offer offer{.process = process, .pointer = reinterpret_cast<uint64_t>(own.data()), .seed = random_number()};
  check(cudaGetDevice(&offer.device), "asking for the current device");
  cudaDeviceProp properties;
  check(cudaGetDeviceProperties(&properties, offer.device), "asking for the device's UUID");
  offer.uuid = properties.uuid;
  offer.exported = cudaIpcGetMemHandle(&offer.handle, own.data());
  const auto stream = make_stream();
  ProofArea area;
  area.own = pattern(offer.seed);
  std::ranges::fill(area.read, area.own);
  std::ranges::fill(area.written, area.own);
  copy_and_wait(own.data(), &area, cudaMemcpyHostToDevice, stream.get());

  own.share();
  const auto offers = gather(communicator, offer, "exchanging device memory", interrupted);
  for (const Offer& one : offers)
    take_turns |= std::ranges::any_of(
        offers, [&](const Offer& other) { return same_device(one, other) && one.process != other.process; });
  Findings findings;
  for (int peer = 0; peer < size; ++peer) {
    findings.opened[peer] = open(offer, offers[peer], opened.emplace_back());
    cudaGetLastError();  // clears the error, which a later call would report otherwise
    bases.push_back(static_cast<std::byte*>(opened.back().get()));
  }
  cross(bases, rank, stream.get());
  gather(communicator, uint8_t{0}, kProving, interrupted);  // all ranks have read and written
  copy_and_wait(&area, own.data(), cudaMemcpyDeviceToHost, stream.get());
  for (int peer = 0; peer < size; ++peer) {
    const ProofArea::Row wanted = pattern(offers[peer].seed);
    findings.misread[peer] = area.read[peer] != wanted;
    findings.missed[peer] = area.written[peer] != wanted;
  }
  unreachable = text_of(gather(communicator, findings, kProving, interrupted), communicator.global_ranks());
}

}  // namespace syncengine::cuda
