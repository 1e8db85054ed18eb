#include "streams/queue.h"

#include <ATen/ops/from_blob.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <torch/csrc/utils/pybind.h>

#include <algorithm>
#include <bit>
#include <thread>
#include <utility>

#include "base/error.h"
#include "cuda/shared_pages.h"

namespace py = pybind11;

namespace syncengine {

namespace {

using Queues = std::map<std::pair<int, int>, std::shared_ptr<Queue>>;  // by device and number

struct QueueRegistry {
  std::mutex mutex;
  std::map<const Communicator*, Queues> queues;
};
QueueRegistry& queue_registry() {
  static auto& instance = *new QueueRegistry;  // never destroyed: the CUDA context is gone before static objects are
  return instance;
}

// The context of the deleter of tensors made by Queue::empty(): their memory, and the device on which to drop it.
struct PeersMemory {
  c10::Device device;
  std::shared_ptr<void> memory;
};
void drop_peers_memory(void* context) {
  const std::unique_ptr<PeersMemory> held(static_cast<PeersMemory*>(context));
  drop_on(held->device, held->memory);
}

}  // namespace

// Asks Python for the handle, once for each stream, since c10 has no way that all supported torch versions share.
void* handle_of(c10::Stream stream) {
  py::gil_scoped_acquire gil;
  static auto& known = *new std::map<std::pair<int, int64_t>, void*>;  // never destroyed, as it outlives Python
  const std::pair<int, int64_t> key{stream.device_index(), stream.id()};
  if (auto found = known.find(key); found != known.end()) return found->second;
  // Another thread may come here meanwhile, since Python code releases the GIL. So the entry is made only when it is
  // complete.
  auto wrapped = py::module_::import("torch.cuda")
                     .attr("Stream")(py::arg("stream_id") = stream.id(),
                                     py::arg("device_index") = static_cast<int>(stream.device_index()),
                                     py::arg("device_type") = static_cast<int>(stream.device_type()));
  return known[key] = reinterpret_cast<void*>(wrapped.attr("cuda_stream").cast<uintptr_t>());
}

c10::Stream current_stream(c10::Device device) { return c10::impl::VirtualGuardImpl(kDeviceType).getStream(device); }

void order_streams(c10::Stream leader, c10::Stream follower) {
  if (leader == follower) return;
  const c10::DeviceGuard use(follower.device());
  c10::Event reached(kDeviceType);
  reached.record(leader);
  reached.block(follower);
}

void keep_for(c10::Stream stream, const c10::Storage& memory) {
  // Memory of Queue::empty() is left out: some of torch's allocators (cudaMallocAsync) raise for memory not their own.
  if (!memory.data() || memory.data_ptr().get_deleter() == drop_peers_memory) return;
  c10::impl::VirtualGuardImpl(kDeviceType).recordDataPtrOnStream(memory.data_ptr(), stream);
}

void wait_on_host(Communicator& communicator, const c10::Event& done, Deadline deadline, const char* call,
                  const Interrupted& interrupted) {
  while (!done.query()) {
    communicator.throw_if_failed();
    interrupted();
    if (deadline.passed()) {
      const std::string text = std::string(call) + ": a CUDA collective has not ended in time";
      communicator.abort(ErrorKind::Timeout, text);
      throw Error(ErrorKind::Timeout, text);
    }
    std::this_thread::sleep_for(std::chrono::microseconds(100));
  }
}

Queue::Queue(std::shared_ptr<cuda::DeviceGroup> group, c10::Device device)
    : group_(std::move(group)),
      device_(device),
      side_(c10::impl::VirtualGuardImpl(kDeviceType).getStreamFromGlobalPool(device, /*isHighPriority=*/true)),
      side_handle_(handle_of(side_)),
      last_(kDeviceType) {}

// Collectives of a group must run one after the other, so `stream` waits for the last one, if that ran on another.
// Between a capture and other calls, this is up to the program that replays the graph (docs/cuda.md).
void Queue::run(const Operation& operation, c10::Stream stream, void* handle) {
  std::lock_guard lock(mutex_);
  const c10::DeviceGuard use(device_);
  const bool capturing = cuda::is_capturing(handle);
  if (!capturing && last_stream_ && *last_stream_ != stream) last_.block(stream);
  group_->run(operation, handle);
  if (capturing) return;
  last_.record(stream);
  last_stream_ = stream;
}

at::Tensor Queue::empty(const std::vector<int64_t>& sizes, size_t bytes, at::ScalarType type,
                        const Interrupted& interrupted) {
  const c10::DeviceGuard use(device_);
  std::unique_ptr<PeersMemory> held(new PeersMemory{device_, group_->allocate(bytes, interrupted)});
  void* data = held->memory.get();
  return at::for_blob(data, sizes)
      .context(held.release(), drop_peers_memory)
      .options(at::TensorOptions().dtype(type).device(device_))
      .target_device(device_)
      .make_tensor();
}

std::shared_ptr<Queue> queue_of(const std::shared_ptr<Communicator>& communicator, c10::Device device,
                                const Interrupted& interrupted, int number) {
  QueueRegistry& registry = queue_registry();
  const std::pair<int, int> key{device.index(), number};
  {
    std::lock_guard lock(registry.mutex);
    const Queues& queues = registry.queues[communicator.get()];
    if (auto found = queues.find(key); found != queues.end()) return found->second;
  }
  const c10::DeviceGuard use(device);
  auto queue = std::make_shared<Queue>(cuda::connect(communicator, device.index(), interrupted), device);
  std::lock_guard lock(registry.mutex);
  return registry.queues[communicator.get()].try_emplace(key, queue).first->second;
}

// Ranks drop their queues at different times, so a queue is taken again only if all ranks have dropped it.
std::shared_ptr<Queue> take_own_queue(const std::shared_ptr<Communicator>& communicator, c10::Device device,
                                      const Interrupted& interrupted) {
  struct Numbers {
    uint64_t free = 0;  // a bit for each of the first 64
    int used = 0;
  } mine;
  {
    std::lock_guard lock(queue_registry().mutex);
    for (const auto& [key, queue] : queue_registry().queues[communicator.get()]) {
      const auto& [index, number] = key;
      if (index != device.index() || number == 0) continue;
      mine.used = std::max(mine.used, number);
      if (queue.use_count() == 1 && number <= 64) mine.free |= uint64_t{1} << (number - 1);
    }
  }
  for (const Numbers& theirs : cuda::gather(*communicator, mine, "Parallel on CUDA", interrupted)) {
    mine.free &= theirs.free;
    mine.used = std::max(mine.used, theirs.used);
  }
  return queue_of(communicator, device, interrupted, 1 + (mine.free ? std::countr_zero(mine.free) : mine.used));
}

void close_devices(const Communicator* communicator) {
  Queues closing;
  {
    std::lock_guard lock(queue_registry().mutex);
    if (auto found = queue_registry().queues.extract(communicator)) closing = std::move(found.mapped());
  }
  for (auto& [key, queue] : closing) {
    const c10::DeviceGuard use(queue->side().device());
    queue->group().close();
  }
}

std::map<std::string, uint64_t> device_counters(const Communicator* communicator) {
  std::map<std::string, uint64_t> counters;
  std::lock_guard lock(queue_registry().mutex);
  const auto found = queue_registry().queues.find(communicator);
  if (found == queue_registry().queues.end()) return counters;
  for (auto& [key, queue] : found->second)
    for (auto& [name, value] : queue->group().counters()) counters["cuda_" + name] += value;
  return counters;
}

}  // namespace syncengine
