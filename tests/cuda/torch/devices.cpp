// Devices, streams and events for c10::impl::VirtualGuardImpl, and the hooks by which ATen knows that there is CUDA.
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/InferenceMode.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include <array>
#include <map>
#include <mutex>

#include "machine.h"

namespace software_torch {

namespace {

constexpr int kDevices = 8, kPool = 32;
thread_local std::array<int64_t, kDevices> current{};  // by device; 0 is the default stream

struct Pool {
  std::vector<cudaStream_t> streams;
  unsigned next = 0;
};
std::mutex mutex;
auto& pools = *new std::map<std::pair<int, bool>, Pool>;

cudaEvent_t event_of(void* event) { return static_cast<cudaEvent_t>(event); }

class Guard final : public c10::impl::DeviceGuardImplInterface {
 public:
  c10::DeviceType type() const override { return kCuda; }
  c10::Device getDevice() const override { return {kCuda, static_cast<c10::DeviceIndex>(get_device())}; }
  void setDevice(c10::Device device) const override { check(cudaSetDevice(device.index()), "cudaSetDevice"); }
  void uncheckedSetDevice(c10::Device device) const noexcept override { cudaSetDevice(device.index()); }
  c10::Device exchangeDevice(c10::Device device) const override {
    const c10::Device before = getDevice();
    setDevice(device);
    return before;
  }
  c10::DeviceIndex deviceCount() const noexcept override { return static_cast<c10::DeviceIndex>(count_devices()); }

  c10::Stream getStream(c10::Device device) const override { return current_stream(device.index()); }
  c10::Stream getDefaultStream(c10::Device device) const override { return stream_with(0, index(device)); }
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool high) const override {
    return stream_from_pool(index(device), high);
  }
  c10::Stream getNewStream(c10::Device device, int priority) const override {
    return stream_from_pool(index(device), priority < 0);
  }
  c10::Stream exchangeStream(c10::Stream stream) const override {
    const c10::Stream before = current_stream(stream.device_index());
    set_current_stream(stream);
    return before;
  }
  void* getStreamNativeHandle(const c10::Stream stream) const override { return handle_of(stream); }
  bool queryStream(const c10::Stream& stream) const override {
    const UseDevice use(stream.device_index());
    return is_ready(cudaStreamQuery(handle_of(stream)), "cudaStreamQuery");
  }
  void synchronizeStream(const c10::Stream& stream) const override { synchronize(stream); }
  bool isStreamCapturing(const c10::Stream& stream) const override { return is_capturing(stream); }
  void synchronizeDevice(const c10::DeviceIndex device) const override {
    const UseDevice use(device);
    check(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
  }
  void recordDataPtrOnStream(const c10::DataPtr& memory, const c10::Stream& stream) const override {
    record_stream(memory, stream);
  }

  void record(void** event, const c10::Stream& stream, const c10::DeviceIndex device,
              const c10::EventFlag) const override {
    TORCH_CHECK(device == -1 || device == stream.device_index(), "an event is recorded on another device than before");
    const UseDevice use(stream.device_index());
    if (!*event) {
      cudaEvent_t made = nullptr;
      check(cudaEventCreateWithFlags(&made, cudaEventDisableTiming), "cudaEventCreate");
      *event = made;
    }
    check(cudaEventRecord(event_of(*event), handle_of(stream)), "cudaEventRecord");
  }
  void block(void* event, const c10::Stream& stream) const override {
    if (!event) return;
    const UseDevice use(stream.device_index());
    check(cudaStreamWaitEvent(handle_of(stream), event_of(event), cudaEventWaitDefault), "cudaStreamWaitEvent");
  }
  bool queryEvent(void* event) const override {
    return !event || is_ready(cudaEventQuery(event_of(event)), "cudaEventQuery");
  }
  void synchronizeEvent(void* event) const override {
    if (event) check(cudaEventSynchronize(event_of(event)), "cudaEventSynchronize");
  }
  void destroyEvent(void* event, const c10::DeviceIndex) const noexcept override {
    if (event) cudaEventDestroy(event_of(event));
  }

 private:
  static int index(c10::Device device) { return device.has_index() ? device.index() : get_device(); }
  static bool is_ready(cudaError_t status, const char* what) {
    if (status != cudaErrorNotReady) check(status, what);
    return status == cudaSuccess;
  }
};

struct Hooks final : at::CUDAHooksInterface {
  explicit Hooks(at::CUDAHooksArgs) {}
  void init() const override {}
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return count_devices() > 0; }
  bool hasCUDA() const override { return count_devices() > 0; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return static_cast<c10::DeviceIndex>(count_devices()); }
  c10::DeviceIndex current_device() const override { return static_cast<c10::DeviceIndex>(get_device()); }
  c10::DeviceIndex getCurrentDevice() const override { return current_device(); }
  void setCurrentDevice(c10::DeviceIndex device) const override { check(cudaSetDevice(device), "cudaSetDevice"); }
  int getNumGPUs() const override { return count_devices(); }
  void deviceSynchronize(c10::DeviceIndex device) const override {
    const UseDevice use(device);
    check(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
  }
  c10::Allocator* getPinnedMemoryAllocator() const override { return pinned_allocator(); }
  bool isPinnedPtr(const void* address) const override { return is_pinned(address); }
};

}  // namespace

void check(cudaError_t status, const char* what) {
  if (status == cudaSuccess) return;
  cudaGetLastError();
  TORCH_CHECK(false, "CUDA error: ", what, ": ", cudaGetErrorString(status));
}

int get_device() {
  int device = 0;
  cudaGetDevice(&device);
  return device;
}

int count_devices() {
  int count = 0;
  if (cudaGetDeviceCount(&count) != cudaSuccess) cudaGetLastError();
  return count;
}

UseDevice::UseDevice(int device) : before_(get_device()) {
  if (device != before_) check(cudaSetDevice(device), "cudaSetDevice");
}
UseDevice::~UseDevice() { cudaSetDevice(before_); }

c10::Stream stream_with(int64_t id, int64_t device) {
  return c10::Stream(c10::Stream::UNSAFE, c10::Device(kCuda, static_cast<c10::DeviceIndex>(device)), id);
}

c10::Stream current_stream(int device) {
  if (device < 0) device = get_device();
  return stream_with(current.at(device), device);
}
void set_current_stream(c10::Stream stream) { current.at(stream.device_index()) = stream.id(); }

c10::Stream stream_from_pool(int device, bool high_priority) {
  const UseDevice use(device);
  std::lock_guard lock(mutex);
  Pool& pool = pools[{device, high_priority}];
  if (pool.streams.size() < kPool) {
    cudaStream_t made = nullptr;
    check(cudaStreamCreateWithFlags(&made, cudaStreamNonBlocking), "cudaStreamCreate");
    pool.streams.push_back(made);
  }
  return stream_with(reinterpret_cast<int64_t>(pool.streams[pool.next++ % kPool]), device);
}

cudaStream_t handle_of(c10::Stream stream) { return reinterpret_cast<cudaStream_t>(stream.id()); }

bool is_capturing(c10::Stream stream) {
  const UseDevice use(stream.device_index());
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  check(cudaStreamIsCapturing(handle_of(stream), &status), "cudaStreamIsCapturing");
  return status != cudaStreamCaptureStatusNone;
}

void enqueue(c10::Stream stream, software::Step step) {
  const UseDevice use(stream.device_index());
  // A device knows no inference mode: in it tensors of either kind may be written.
  software::enqueue(software::stream_of(handle_of(stream)), [step = std::move(step)] {
    const c10::InferenceMode any_tensor;
    step();
  });
}

void synchronize(c10::Stream stream) {
  const UseDevice use(stream.device_index());
  check(cudaStreamSynchronize(handle_of(stream)), "cudaStreamSynchronize");
}

C10_REGISTER_GUARD_IMPL(CUDA, Guard);

}  // namespace software_torch

namespace at {
using SoftwareHooks = software_torch::Hooks;
C10_REGISTER_CLASS(CUDAHooksRegistry, CUDAHooks, SoftwareHooks)
}  // namespace at
