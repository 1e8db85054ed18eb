// syncengine._C.CommonMemory: memory that the ranks of a host have in common, as tensors, and how they get it.
#include <torch/csrc/utils/pybind.h>

#include <ATen/EmptyTensor.h>
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

// Passes one rank's memory to the others of its host. These make empty memory, as each must give a descriptor to all.
struct MemoryExchange {
  explicit MemoryExchange(size_t bytes) : own(shm::Region::create(bytes)) {}

  Shared exchange(int rank, const std::vector<std::string>& addresses, int maker, double timeout,
                  const std::vector<int>& global_ranks) {
    size_t members = 0;
    for (const auto& address : addresses) members += !address.empty();
    if (members <= 1) return std::move(own);
    auto memories = fd_exchange.exchange(rank, addresses, own->fd(), Deadline::after(seconds(timeout)),
                                         raise_pending_signal, RankNames{global_ranks});
    return rank == maker ? std::move(own) : shm::Region::open(std::move(memories.at(maker)));
  }

  Shared own;
  FdExchange fd_exchange;
};

// The deleter of tensors in common memory. is_borrowed() recognizes such tensors by its type.
struct Keep {
  Shared region;
  void operator()(void*) { region.reset(); }
};

// Each tensor has a storage of its own, so that saving one tensor does not save them all.
at::Tensor tensor_in(const Shared& region, size_t offset, const std::vector<int64_t>& sizes,
                     const std::vector<int64_t>& strides, at::ScalarType type) {
  void* data = region->at(offset, at::detail::computeStorageNbytes(sizes, strides, c10::elementSize(type)));
  return at::from_blob(data, sizes, strides, Keep{region}, at::TensorOptions().dtype(type));
}

// Whether torch has the tensor's memory from other code, which may still hold it: memory of numpy arrays, buffers,
// DLPack and the like comes with a deleter. False for memory that torch has allocated, read or mapped itself, and for
// tensors that tensor_in() has made.
bool is_borrowed(const at::Tensor& tensor) {
  const at::DataPtr& data = tensor.storage().data_ptr();
  if (data.get() == nullptr) return false;
  if (data.get_context() == nullptr) return true;  // nobody frees it
  int place = 0;                                   // any address: only the deleter is needed
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
  py::class_<shm::Region, Shared>(module, "CommonMemory")
      .def_property_readonly("bytes", &shm::Region::bytes)
      .def("tensor", &tensor_in, py::arg("offset"), py::arg("sizes"), py::arg("strides"), py::arg("dtype"))
      .def("decide", &shm::Region::decide, py::arg("number"), py::arg("proceeds"))
      .def(
          "complete",
          [](shm::Region& self, int rank, uint64_t number) {
            sync_point("updated");
            self.complete(rank, number);
            sync_point("completed");
          },
          py::arg("rank"), py::arg("number"))
      .def("completed", &shm::Region::completed, py::arg("ranks"))
      .def("tear", &shm::Region::tear, py::arg("number"))
      .def_property_readonly("torn", &shm::Region::torn)
      .def("detach", &shm::Region::detach, py::call_guard<py::gil_scoped_release>());

  py::class_<MemoryExchange>(module, "MemoryExchange")
      .def(py::init<size_t>(), py::arg("bytes"))
      .def("address", [](const MemoryExchange& self) { return py::bytes(self.fd_exchange.address()); })
      .def("exchange", &MemoryExchange::exchange, py::arg("rank"), py::arg("addresses"), py::arg("maker"),
           py::arg("timeout"), py::arg("global_ranks"), py::call_guard<py::gil_scoped_release>());

  module.def(
      "storage_references", [](const at::Tensor& tensor) { return tensor.storage().use_count(); }, py::arg("tensor"));
  module.def("is_borrowed", &is_borrowed, py::arg("tensor"));
  module.def(
      "is_dense", [](const at::Tensor& tensor) { return tensor.is_non_overlapping_and_dense(); }, py::arg("tensor"));
  module.def("return_free_memory", &return_free_memory, py::call_guard<py::gil_scoped_release>());
  module.def("fault_point", [](const std::string& name) { sync_point(name.c_str()); }, py::arg("name"));
}

}  // namespace syncengine
