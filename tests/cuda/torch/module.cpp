// The functions of torch._C that torch.cuda calls, for tests/support/software_torch.py to put there.
#include <torch/csrc/utils/pybind.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>

#include <chrono>
#include <thread>

#include "gloo.h"
#include "machine.h"

namespace py = pybind11;

namespace software_torch {

namespace {

using Id = std::tuple<int64_t, int64_t, int64_t>;  // as torch._C._cuda_getCurrentStream gives it

Id id_of(c10::Stream stream) {
  return {stream.id(), stream.device_index(), static_cast<int64_t>(stream.device_type())};
}
int exchange_device(int device) {
  const int before = get_device();
  if (device >= 0) check(cudaSetDevice(device), "cudaSetDevice");
  return device < 0 ? -1 : before;
}
class Graph {
 public:
  void begin(py::object, const std::string& mode) {
    stream_ = current_stream(-1);
    TORCH_CHECK(stream_->id() != 0, "CUDA graphs must be captured on a non-default stream.");
    capture_memory(true);
    const auto how = mode == "global"         ? cudaStreamCaptureModeGlobal
                     : mode == "thread_local" ? cudaStreamCaptureModeThreadLocal
                                              : cudaStreamCaptureModeRelaxed;
    check(cudaStreamBeginCapture(handle_of(*stream_), how), "cudaStreamBeginCapture");
  }
  void end() {
    TORCH_CHECK(stream_ && *stream_ == current_stream(-1), "Capture must end on the same stream it began on.");
    cudaGraph_t graph = nullptr;
    const cudaError_t status = cudaStreamEndCapture(handle_of(*stream_), &graph);
    capture_memory(false);
    check(status, "cudaStreamEndCapture");
    check(cudaGraphInstantiate(&executable_, graph, 0), "cudaGraphInstantiate");
    cudaGraphDestroy(graph);
  }
  void replay() {
    TORCH_CHECK(executable_, "Called CUDAGraph::replay without a preceding successful capture.");
    const c10::Stream stream = current_stream(-1);
    const UseDevice use(stream.device_index());
    check(cudaGraphLaunch(executable_, handle_of(stream)), "cudaGraphLaunch");
  }

 private:
  std::optional<c10::Stream> stream_;
  cudaGraphExec_t executable_ = nullptr;  // lives as long as the process, with its memory
};

}  // namespace

PYBIND11_MODULE(software_torch_cuda, module) {
  module.def("_cuda_init", [] {});
  module.def("_cuda_isInBadFork", [] { return false; });
  module.def("_cuda_getDeviceCount", count_devices);
  module.def("_cuda_getDevice", get_device);
  module.def("_cuda_setDevice", [](int device) { exchange_device(device); });
  module.def("_cuda_exchangeDevice", exchange_device);
  module.def("_cuda_maybeExchangeDevice", exchange_device);
  module.def(
      "_cuda_synchronize", [] { check(cudaDeviceSynchronize(), "cudaDeviceSynchronize"); },
      py::call_guard<py::gil_scoped_release>());
  // As if the clock of the device went at 2 GHz.
  module.def("_cuda_sleep", [](int64_t cycles) {
    enqueue(current_stream(-1), [cycles] { std::this_thread::sleep_for(std::chrono::nanoseconds(cycles / 2)); });
  });
  module.def("_cuda_getCurrentStream", [](int device) { return id_of(current_stream(device)); });
  module.def("_cuda_getCurrentRawStream", [](int device) { return std::get<0>(id_of(current_stream(device))); });
  module.def("_cuda_getDefaultStream", [](int device) { return id_of(stream_with(0, device)); });
  module.def(
      "_cuda_setStream",
      [](int64_t stream_id, int64_t device_index, int64_t) {
        exchange_device(static_cast<int>(device_index));
        set_current_stream(stream_with(stream_id, device_index));
      },
      py::arg("stream_id"), py::arg("device_index"), py::arg("device_type"));
  module.def("_cuda_isCurrentStreamCapturing", [] { return is_capturing(current_stream(-1)); });
  module.def("_cuda_emptyCache", empty_cache, py::call_guard<py::gil_scoped_release>());
  module.def("resize_storage", [](const at::Tensor& whole, size_t bytes) { resize_storage(whole.storage(), bytes); });
  module.def("memory_info", [](int device) {
    const UseDevice use(device);
    size_t free = 0, total = 0;
    check(cudaMemGetInfo(&free, &total), "cudaMemGetInfo");
    return std::pair(free, total);
  });
  py::class_<Graph>(module, "_CUDAGraph")
      .def(py::init<>())
      .def("capture_begin", &Graph::begin, py::arg("pool") = py::none(), py::arg("capture_error_mode") = "global")
      .def("capture_end", &Graph::end)
      .def("replay", &Graph::replay, py::call_guard<py::gil_scoped_release>());
  py::module_::import("torch.distributed");
  py::class_<HostGloo, c10::intrusive_ptr<HostGloo>, ::c10d::Backend>(module, "HostGloo")
      .def(py::init([](c10::intrusive_ptr<::c10d::Backend> gloo) { return c10::make_intrusive<HostGloo>(gloo); }));
}

}  // namespace software_torch
