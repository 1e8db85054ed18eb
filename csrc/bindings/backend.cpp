#include <torch/csrc/utils/pybind.h>

#include <pybind11/stl.h>

#include "bindings/bindings.h"
#include "c10d/backend.h"

namespace py = pybind11;

namespace syncengine {

void bind_backend(py::module_& module) {
  py::module_::import("torch.distributed");  // knows the class that ours derives from
  py::class_<TorchBackend, c10::intrusive_ptr<TorchBackend>, ::c10d::Backend>(
      module, "Backend", "The torch.distributed backend: a communicator with c10d's face.")
      .def(py::init<std::shared_ptr<Communicator>>(), py::arg("communicator"))
      .def_property_readonly("communicator", &TorchBackend::communicator, "The engine's communicator below.")
      .def(
          "split",
          [](TorchBackend& self, const std::vector<int>& ranks) {
            py::gil_scoped_release nogil;
            return self.split(nullptr, ranks, nullptr);
          },
          py::arg("ranks"),
          "The backend of `ranks` of this group, in ascending order; None on a rank that is not among them. Every rank "
          "must call it.")
      .def(
          "perform_nocolor_split", [](TorchBackend&, const py::object&) {}, py::arg("device"),
          "Nothing. torch asks it of ranks that a new group leaves out, if the default group is bound to a CPU.")
      .def_property_readonly(
          "options", [](TorchBackend& self) { return self.getBackendOptions(); }, "What torch keeps of its settings.");
  module.def("backend_communicators", &TorchBackend::open_communicators,
             "The communicators below all backends of this process that have not been shut down.");
  module.def("end_backends", &TorchBackend::end_all, py::call_guard<py::gil_scoped_release>(),
             "Closes these, and completes what futures they still owe. Before the interpreter ends.");
}

}  // namespace syncengine
