// syncengine._C.WatchedWeights and WeightSlices.
#include "reducer/torch/weights.h"

#include <torch/csrc/utils/pybind.h>

#include <pybind11/stl.h>

#include "bindings/bindings.h"

namespace py = pybind11;

namespace syncengine {

void bind_weights(py::module_& module) {
  py::class_<WatchedWeights>(module, "WatchedWeights", "Whether parameters were written to since this rank looked.")
      .def(py::init<std::vector<at::Tensor>>(), py::arg("parameters"),
           "Notes where they lie, for good, and their versions.")
      .def("note", &WatchedWeights::note, "Their versions are as they should be.")
      .def("note_update", &WatchedWeights::note_update, "Raises their versions, and notes these.")
      .def("moved", &WatchedWeights::moved, "The first that lies in other memory than at first.")
      .def("written", &WatchedWeights::written, "The first that has another version than noted.")
      .def(
          "gradients", [](const WatchedWeights& self) { return py::bytes(self.gradients()); },
          "Of each parameter: 0, it has no gradient; 1, a dense one; 2, another.");

  py::class_<WeightSlices>(module, "WeightSlices", "Parts of parameters, which borrow their gradients.")
      .def(py::init([](const std::vector<std::tuple<at::Tensor, at::Tensor, int64_t>>& slices) {
             std::vector<WeightSlices::Slice> made;
             for (const auto& [parameter, tensor, begin] : slices) made.push_back({parameter, tensor, begin});
             return WeightSlices(std::move(made));
           }),
           py::arg("slices"), "Each: a parameter, a tensor of its elements from `begin` on, and `begin`.")
      .def("take_gradients", &WeightSlices::take_gradients, "Each tensor gets its part of the parameter's gradient.")
      .def("drop_gradients", &WeightSlices::drop_gradients, "They belong to the parameters alone.");
}

}  // namespace syncengine
