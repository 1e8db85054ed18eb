// syncengine._C.CommonMemory: what the ranks of a host have in common, as tensors; and how they come by it.
#include <torch/csrc/utils/pybind.h>

#include <ATen/ops/from_blob.h>
#include <malloc.h>
#include <pybind11/stl.h>

#include "base/error.h"
#include "base/sync_point.h"
#include "bindings/bindings.h"
#include "bootstrap/fd_exchange.h"
#include "reducer/torch/python_error.h"
#include "transport/shm/region.h"

namespace py = pybind11;

namespace syncengine {

namespace {

using Shared = std::shared_ptr<shm::Region>;

// Made by one of a host's ranks and given to the others. The others' own is empty, and goes at once.
struct MemoryExchange {
  explicit MemoryExchange(size_t bytes) : own(shm::Region::create(bytes)) {}

  Shared exchange(int rank, const std::vector<std::string>& addresses, int maker, double timeout,
                  const std::vector<int>& global_ranks) {
    size_t members = 0;
    for (const auto& address : addresses) members += !address.empty();
    if (members <= 1) return std::move(own);
    auto memories = fd_exchange.exchange(rank, addresses, own->fd(), Deadline::after(seconds(timeout)),
                                         raise_pending_signal, RankNames(global_ranks));
    return rank == maker ? std::move(own) : shm::Region::open(std::move(memories.at(maker)));
  }

  Shared own;
  FdExchange fd_exchange;
};

// A deleter, by which such tensors are known.
struct Keep {
  Shared region;
  void operator()(void*) { region.reset(); }
};

// Each has a storage of its own, so that saving one does not save all.
at::Tensor tensor_in(const Shared& region, size_t offset, const std::vector<int64_t>& sizes,
                     const std::vector<int64_t>& strides, at::ScalarType type) {
  size_t elements = 1;
  for (size_t i = 0; i < sizes.size(); ++i) {
    if (sizes[i] == 0) elements = 0;
    if (elements > 0) elements += static_cast<size_t>(sizes[i] - 1) * static_cast<size_t>(strides.at(i));
  }
  void* data = region->at(offset, elements * c10::elementSize(type));
  return at::from_blob(data, sizes, strides, Keep{region}, at::TensorOptions().dtype(type));
}

// Whether torch has it from other code, which may hold it still: numpy arrays, buffers, DLPack and the like come with a
// deleter. Not what torch has allocated, read or mapped itself, nor what tensor_in() has made.
bool is_borrowed(const at::Tensor& tensor) {
  const at::DataPtr& data = tensor.storage().data_ptr();
  if (data.get() == nullptr) return false;
  if (data.get_context() == nullptr) return true;  // nobody frees it
  int place = 0;                                   // that torch has a name for the deleter alone is its own affair
  const auto deleter = c10::InefficientStdFunctionContext::makeDataPtr(&place, [](void*) {}, at::kCPU).get_deleter();
  const auto* context = data.cast_context<c10::InefficientStdFunctionContext>(deleter);
  return context != nullptr && context->deleter_.target<Keep>() == nullptr;
}

void return_free_memory() {
#ifdef __GLIBC__
  malloc_trim(0);
#endif
}

}  // namespace

void bind_common_memory(py::module_& module) {
  py::class_<shm::Region, Shared>(module, "CommonMemory", "Memory that the ranks of a host have in common.")
      .def_property_readonly("bytes", &shm::Region::bytes)
      .def_property_readonly("is_shared", &shm::Region::is_shared, "Whether it has not been detached.")
      .def("tensor", &tensor_in, py::arg("offset"), py::arg("sizes"), py::arg("strides"), py::arg("dtype"),
           "A tensor with a storage of its own.")
      .def("decide", &shm::Region::decide, py::arg("number"), py::arg("proceeds"),
           "The decision on update `number`: `proceeds`, if no rank was first to say otherwise.")
      .def(
          "complete",
          [](shm::Region& self, int rank, uint64_t number) {
            sync_point("updated");
            self.complete(rank, number);
            sync_point("completed");
          },
          py::arg("rank"), py::arg("number"), "This rank has made its part of update `number`.")
      .def("completed", &shm::Region::completed, py::arg("ranks"), "Of each rank, the last update it has completed.")
      .def("tear", &shm::Region::tear, py::arg("number"), "Update `number` will never be complete.")
      .def_property_readonly("torn", &shm::Region::torn, "The update that will never be complete; 0: none.")
      .def("detach", &shm::Region::detach, py::call_guard<py::gil_scoped_release>(),
           "From now on a private copy, at the same addresses. False if memory is short.");

  py::class_<MemoryExchange>(module, "MemoryExchange", "How the ranks of a host come to have memory in common.")
      .def(py::init<size_t>(), py::arg("bytes"), "`bytes`: on the rank that makes it; 0 on the others.")
      .def(
          "address", [](const MemoryExchange& self) { return py::bytes(self.fd_exchange.address()); },
          "Less than 144 bytes, with a secret, for the others.")
      .def("exchange", &MemoryExchange::exchange, py::arg("rank"), py::arg("addresses"), py::arg("maker"),
           py::arg("timeout"), py::arg("global_ranks"), py::call_guard<py::gil_scoped_release>(),
           "What rank `maker` has made. `addresses` by rank, empty for those of other hosts; messages call the ranks "
           "`global_ranks`. Collective, once.");

  module.def(
      "storage_references", [](const at::Tensor& tensor) { return tensor.storage().use_count(); }, py::arg("tensor"),
      "How many tensors, views and others hold this tensor's memory.");
  module.def("is_borrowed", &is_borrowed, py::arg("tensor"),
             "Whether other code than torch has made this tensor's memory, and may hold it.");
  module.def(
      "is_dense", [](const at::Tensor& tensor) { return tensor.is_non_overlapping_and_dense(); }, py::arg("tensor"),
      "Whether its elements lie without gaps and do not share memory.");
  module.def("return_free_memory", &return_free_memory, py::call_guard<py::gil_scoped_release>(),
             "Gives the machine what malloc keeps of what was freed, where the C library can do that.");
  module.def(
      "fault_point", [](const std::string& name) { sync_point(name.c_str()); }, py::arg("name"),
      "A point where tests of faults can interfere; nothing otherwise.");
}

}  // namespace syncengine
