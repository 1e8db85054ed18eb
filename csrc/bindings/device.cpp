#include "bindings/device.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>
#include <c10/core/Event.h>
#include <c10/core/Stream.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <torch/csrc/utils/pybind.h>

#include <mutex>
#include <optional>
#include <thread>
#include <unordered_map>

#include "bindings/errors.h"
#include "cuda/device_group.h"
#include "reducer/python_error.h"

namespace py = pybind11;

namespace syncengine {

namespace {

constexpr c10::DeviceType kDeviceType = c10::DeviceType::CUDA;

// The cudaStream_t of a torch stream. Asks Python, once a stream: c10 has no way to ask that all torch versions share. With the GIL.
void* handle_of(c10::Stream stream) {
  static auto& known = *new std::map<std::pair<int, int64_t>, void*>;  // outlives Python
  auto [entry, is_new] = known.try_emplace({stream.device_index(), stream.id()}, nullptr);
  if (is_new) {
    auto wrapped = py::module_::import("torch.cuda")
                       .attr("Stream")(py::arg("stream_id") = stream.id(),
                                       py::arg("device_index") = static_cast<int>(stream.device_index()),
                                       py::arg("device_type") = static_cast<int>(stream.device_type()));
    entry->second = reinterpret_cast<void*>(wrapped.attr("cuda_stream").cast<uintptr_t>());
  }
  return entry->second;
}

c10::Stream current_stream(c10::Device device) { return c10::impl::VirtualGuardImpl(kDeviceType).getStream(device); }

// A communicator's ranks with one device each, and torch's streams that its collectives run on.
class Queue {
 public:
  Queue(std::shared_ptr<cuda::DeviceGroup> group, c10::Device device)
      : group_(std::move(group)),
        device_(device),
        side_(c10::impl::VirtualGuardImpl(kDeviceType).getStreamFromGlobalPool(device, /*isHighPriority=*/true)),
        last_(kDeviceType) {}

  cuda::DeviceGroup& group() { return *group_; }
  c10::Stream side() const { return side_; }

  // Collectives of a group must run one after the other: what ran before on another stream comes first. Across the edges of a
  // capture that is up to whoever replays it (docs/cuda.md).
  void run(const Operation& operation, c10::Stream stream, void* handle) {
    std::lock_guard lock(mutex_);
    const bool capturing = group_->is_capturing(handle);
    if (!capturing && last_stream_ && *last_stream_ != stream) last_.block(stream);
    group_->run(operation, handle);
    if (capturing) return;
    last_.record(stream);
    last_stream_ = stream;
  }

 private:
  std::shared_ptr<cuda::DeviceGroup> group_;
  c10::Device device_;
  c10::Stream side_;
  std::mutex mutex_;
  c10::Event last_;
  std::optional<c10::Stream> last_stream_;
};

struct Registry {
  std::mutex mutex;
  std::map<std::pair<const Communicator*, int>, std::shared_ptr<Queue>> queues;
};
Registry& registry() {
  static auto& instance = *new Registry;  // outlives the CUDA context, which is gone when static objects are destroyed
  return instance;
}

std::shared_ptr<Queue> find_queue(const Communicator* communicator, int device) {
  std::lock_guard lock(registry().mutex);
  auto found = registry().queues.find({communicator, device});
  return found == registry().queues.end() ? nullptr : found->second;
}

// With the GIL, which is released while ranks connect.
std::shared_ptr<Queue> queue_of(const std::shared_ptr<Communicator>& communicator, c10::Device device) {
  if (auto queue = find_queue(communicator.get(), device.index())) return queue;
  cuda::require_device(device.index());
  std::shared_ptr<cuda::DeviceGroup> group;
  {
    py::gil_scoped_release nogil;
    group = cuda::connect(communicator, device.index(), check_signals());
  }
  auto queue = std::make_shared<Queue>(std::move(group), device);
  std::lock_guard lock(registry().mutex);
  return registry().queues.try_emplace({communicator.get(), device.index()}, queue).first->second;
}

class CudaWork final : public PyWork {
 public:
  CudaWork(std::shared_ptr<Communicator> communicator, c10::Stream side, at::Tensor from, at::Tensor to,
           at::Tensor target, at::Tensor result)
      : communicator_(std::move(communicator)),
        done_(kDeviceType),
        from_(std::move(from)),
        to_(std::move(to)),
        target_(std::move(target)),
        result_(std::move(result)) {
    done_.record(side);
  }

  // The current stream waits, not the host: unless there is a limit, which only a host can keep.
  void wait(std::optional<double> timeout) override {
    communicator_->throw_if_failed();
    if (timeout) wait_on_host(Deadline::after(seconds(*timeout)));
    done_.block(current_stream(target_.device()));
    std::call_once(delivered_, [this] {
      at::NoGradGuard no_grad;
      if (result_.defined()) target_.copy_(result_);
      result_.reset();
    });
  }
  bool is_completed() const override { return done_.query(); }
  py::object exception() const override {
    try {
      communicator_->throw_if_failed();
    } catch (const Error& error) {
      return to_python(error);
    }
    return py::none();
  }

 private:
  void wait_on_host(Deadline deadline) {
    py::gil_scoped_release nogil;
    auto interrupted = check_signals();
    while (!done_.query()) {
      communicator_->throw_if_failed();
      interrupted();
      if (deadline.passed()) {
        const std::string text = "Work.wait(timeout): a CUDA collective has not ended in time";
        communicator_->abort(ErrorKind::Timeout, text);
        throw Error(ErrorKind::Timeout, text);
      }
      std::this_thread::sleep_for(std::chrono::microseconds(100));
    }
  }

  std::shared_ptr<Communicator> communicator_;
  c10::Event done_;
  at::Tensor from_, to_, target_, result_;
  std::once_flag delivered_;
};

void keep_for(c10::Stream stream, const at::Tensor& tensor) {
  if (tensor.storage().data())
    c10::impl::VirtualGuardImpl(kDeviceType).recordDataPtrOnStream(tensor.storage().data_ptr(), stream);
}

}  // namespace

std::unique_ptr<PyWork> run_on_device(const std::shared_ptr<Communicator>& communicator, Operation operation,
                                      const at::Tensor& from, const at::Tensor& to, const at::Tensor& target,
                                      const at::Tensor& result, bool async_op) {
  at::NoGradGuard no_grad;
  const c10::Device device = from.device();
  const c10::Stream current = current_stream(device);
  c10::Stream stream = current;
  if (communicator->size() == 1) {
    communicator->throw_if_failed();
    require_supported(operation);
    if (!to.is_same(from)) to.view({-1}).copy_(from.reshape({-1}));
  } else {
    auto queue = queue_of(communicator, device);
    if (async_op) {
      stream = queue->side();
      c10::Event ready(kDeviceType);
      ready.record(current);
      ready.block(stream);
      keep_for(stream, from);
      keep_for(stream, to);
    }
    void* handle = handle_of(stream);
    py::gil_scoped_release nogil;
    queue->run(operation, stream, handle);
  }
  if (async_op) return std::make_unique<CudaWork>(communicator, stream, from, to, target, result);
  if (result.defined()) target.copy_(result);
  return nullptr;
}

at::Tensor empty_on_device(const std::shared_ptr<Communicator>& communicator, const std::vector<int64_t>& sizes,
                           size_t bytes, at::ScalarType type, c10::Device device) {
  if (!device.is_cuda())
    throw Error(ErrorKind::InvalidUsage, "empty: device '" + device.str() + "' is neither a CPU nor a CUDA device");
  if (!device.has_index()) {
    cuda::require_device(0);
    device = c10::impl::VirtualGuardImpl(kDeviceType).getDevice();
  }
  cuda::require_device(device.index());
  const auto options = at::TensorOptions().dtype(type).device(device);
  if (communicator->size() == 1) return at::empty(sizes, options);
  auto queue = queue_of(communicator, device);
  std::shared_ptr<void> memory;
  {
    py::gil_scoped_release nogil;
    memory = queue->group().allocate(bytes, check_signals());
  }
  void* data = memory.get();
  return at::for_blob(data, sizes)
      .deleter([memory = std::move(memory)](void*) mutable { memory.reset(); })
      .options(options)
      .target_device(device)
      .make_tensor();
}

void close_devices(const Communicator* communicator) {
  std::vector<std::shared_ptr<Queue>> closing;
  {
    std::lock_guard lock(registry().mutex);
    auto& queues = registry().queues;
    for (auto entry = queues.lower_bound({communicator, -1});
         entry != queues.end() && entry->first.first == communicator;)
      closing.push_back(std::move(entry->second)), entry = queues.erase(entry);
  }
  for (auto& queue : closing) queue->group().close();
}

std::map<std::string, uint64_t> device_counters(const Communicator* communicator) {
  std::map<std::string, uint64_t> counters;
  std::lock_guard lock(registry().mutex);
  for (auto& [key, queue] : registry().queues)
    if (key.first == communicator)
      for (auto& [name, value] : queue->group().counters()) counters["cuda_" + name] += value;
  return counters;
}

}  // namespace syncengine
