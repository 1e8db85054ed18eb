// Device memory for tensors, with the lives that torch's caching allocator gives it: what is freed is the next tensor's
// at once, in the order of the stream for which it was taken, unless another stream was recorded. The next tensor
// begins as poison, written in that order: who still uses the memory on another stream finds that.
#include <c10/core/Allocator.h>
#include <c10/core/CPUAllocator.h>

#include <atomic>
#include <bit>
#include <cstring>
#include <map>
#include <mutex>
#include <set>
#include <vector>

#include "machine.h"

namespace software_torch {

namespace {

constexpr size_t kSegment = 2 << 20;                   // small blocks are cut from such, larger ones are their own
constexpr size_t kLargest = 1 << 20, kSmallest = 512;  // of the small ones
constexpr size_t kPoisoned = 256 << 10;                // at both ends of what is larger
constexpr unsigned char kPoison = 0xcb;

struct Block {
  c10::Stream stream;
  std::byte* data;
  size_t bytes;
  bool of_a_graph;
  std::set<int64_t> users;  // other streams
  std::shared_ptr<std::atomic<size_t>> busy;
};

using Place = std::tuple<int, int64_t, size_t>;  // device, stream, bytes
std::mutex memory_mutex;
auto& cached = *new std::map<Place, std::vector<Block*>>;
auto& waiting = *new std::vector<Block*>;  // freed, and other streams are not done with them
auto& segments = *new std::map<std::pair<int, int64_t>, std::pair<std::byte*, size_t>>;
int captures = 0;

Place place_of(const Block& block) {
  return {static_cast<int>(block.stream.device_index()), block.stream.id(), block.bytes};
}

size_t rounded(size_t bytes) {
  if (bytes <= kLargest) return std::max(kSmallest, std::bit_ceil(bytes));
  return (bytes + kSegment - 1) / kSegment * kSegment;
}

std::byte* device_memory(size_t bytes) {
  cudaStreamCaptureMode mode = cudaStreamCaptureModeRelaxed;
  cudaThreadExchangeStreamCaptureMode(&mode);
  void* data = nullptr;
  const cudaError_t status = cudaMalloc(&data, bytes);
  cudaThreadExchangeStreamCaptureMode(&mode);
  if (status == cudaErrorMemoryAllocation) cudaGetLastError();
  TORCH_CHECK_WITH(OutOfMemoryError, status == cudaSuccess, "CUDA out of memory. Tried to allocate ", bytes, " bytes");
  return static_cast<std::byte*>(data);
}

std::byte* cut(c10::Stream stream, size_t bytes) {
  if (bytes > kLargest) return device_memory(bytes);
  auto& [next, left] = segments[{stream.device_index(), stream.id()}];
  if (left < bytes) next = device_memory(left = kSegment);
  std::byte* data = next;
  next += bytes;
  left -= bytes;
  return data;
}

void poison(const Block& block) {
  enqueue(block.stream, [data = block.data, bytes = block.bytes] {
    const size_t part = std::min(bytes, kPoisoned);
    std::memset(data, kPoison, part);
    std::memset(data + bytes - part, kPoison, part);
  });
}

void cache(Block* block) { cached[place_of(*block)].push_back(block); }

// Not while a graph is captured, when nobody may ask how far streams are.
void look_at_waiting() {
  if (captures > 0) return;
  std::erase_if(waiting, [](Block* block) {
    if (!block->busy) {
      block->busy = std::make_shared<std::atomic<size_t>>(block->users.size());
      for (int64_t user : block->users)
        enqueue(c10::Stream(c10::Stream::UNSAFE, block->stream.device(), user), [busy = block->busy] { --*busy; });
    }
    if (*block->busy > 0) return false;
    block->busy.reset();
    block->users.clear();
    cache(block);
    return true;
  });
}

void give_back(void* context) {
  auto* block = static_cast<Block*>(context);
  std::lock_guard lock(memory_mutex);
  if (block->of_a_graph) return;  // of its replays
  if (block->users.empty() && !is_capturing(block->stream)) return cache(block);
  waiting.push_back(block);
  look_at_waiting();
}

class Allocator final : public c10::Allocator {
 public:
  c10::DataPtr allocate(size_t bytes) override {
    const c10::Stream stream = current_stream(-1);
    if (bytes == 0) return {nullptr, stream.device()};
    std::lock_guard lock(memory_mutex);
    look_at_waiting();
    const size_t size = rounded(bytes);
    const bool of_a_graph = captures > 0 && is_capturing(stream);
    auto& free = cached[{stream.device_index(), stream.id(), size}];
    Block* block;
    if (!of_a_graph && !free.empty()) {
      block = free.back();
      free.pop_back();
      poison(*block);
    } else {
      block = new Block{stream, cut(stream, size), size, of_a_graph, {}, nullptr};
    }
    return {block->data, block, give_back, stream.device()};
  }
  c10::DeleterFnPtr raw_deleter() const override { return nullptr; }
  void copy_data(void* to, const void* from, std::size_t bytes) const override {
    enqueue(current_stream(-1), [=] { std::memcpy(to, from, bytes); });
  }
};

// Memory of the host that says that it is pinned. Copies from and to it wait, as from and to any other.
std::mutex pinned_mutex;
auto& all_pinned = *new std::map<const std::byte*, size_t>;

class PinnedAllocator final : public c10::Allocator {
 public:
  c10::DataPtr allocate(size_t bytes) override {
    auto* pinned = new c10::DataPtr(c10::GetCPUAllocator()->allocate(bytes));
    void* data = pinned->get();
    std::lock_guard lock(pinned_mutex);
    all_pinned[static_cast<std::byte*>(data)] = bytes;
    return {data, pinned, release, c10::kCPU};
  }
  void copy_data(void* to, const void* from, std::size_t bytes) const override { std::memcpy(to, from, bytes); }

 private:
  static void release(void* context) {
    auto* pinned = static_cast<c10::DataPtr*>(context);
    {
      std::lock_guard lock(pinned_mutex);
      all_pinned.erase(static_cast<std::byte*>(pinned->get()));
    }
    delete pinned;
  }
};

}  // namespace

c10::Allocator* pinned_allocator() {
  static auto& instance = *new PinnedAllocator;
  return &instance;
}

bool is_pinned(const void* address) {
  std::lock_guard lock(pinned_mutex);
  auto after = all_pinned.upper_bound(static_cast<const std::byte*>(address));
  if (after == all_pinned.begin()) return false;
  const auto& [begin, bytes] = *std::prev(after);
  return static_cast<const std::byte*>(address) < begin + std::max<size_t>(bytes, 1);
}

c10::Allocator* allocator() {
  static auto& instance = *new Allocator;
  return &instance;
}

void record_stream(const c10::DataPtr& memory, c10::Stream stream) {
  if (memory.get_deleter() != give_back) return;  // not ours, as memory of syncengine.empty
  auto* block = static_cast<Block*>(memory.get_context());
  std::lock_guard lock(memory_mutex);
  if (stream != block->stream) block->users.insert(stream.id());
}

void empty_cache() {
  std::lock_guard lock(memory_mutex);
  look_at_waiting();
  for (auto& [place, blocks] : cached) {
    if (std::get<2>(place) <= kLargest) continue;
    for (Block* block : blocks) {
      check(cudaFree(block->data), "cudaFree");
      delete block;
    }
    blocks.clear();
  }
}

void capture_memory(bool begins) {
  std::lock_guard lock(memory_mutex);
  captures += begins ? 1 : -1;
}

namespace {
[[maybe_unused]] const bool registered = (c10::SetAllocator(kCuda, allocator()), true);
}

}  // namespace software_torch
