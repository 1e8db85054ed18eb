// syncengine._C.Reducer
#include <pybind11/stl.h>
#include <torch/csrc/utils/pybind.h>

#include "bindings/bindings.h"
#include "reducer/reducer.h"

namespace syncengine {

namespace py = pybind11;

namespace {

std::shared_ptr<Reducer> make_reducer(std::vector<at::Tensor> parameters, std::string model_name,
                                      std::vector<std::string> parameter_names,
                                      std::shared_ptr<Communicator> communicator, bool find_unused_parameters,
                                      bool gradients_in_arena) {
  if (parameters.size() != parameter_names.size()) {
    throw Error(ErrorKind::InvalidUsage, "Reducer needs one name for each parameter");
  }
  return std::make_shared<Reducer>(std::move(parameters), ModelNames{std::move(model_name), std::move(parameter_names)},
                                   std::move(communicator), find_unused_parameters, gradients_in_arena);
}

py::dict statistics_dict(const Reducer& reducer) {
  Statistics statistics;
  {
    py::gil_scoped_release no_gil;
    statistics = reducer.statistics();
  }
  py::dict copied;
  for (size_t i = 0; i < kCopyReasons; ++i) copied[name(static_cast<CopyReason>(i))] = statistics.copied_bytes[i];
  py::dict result;
  result["backwards"] = statistics.backwards;
  result["buckets"] = statistics.buckets;
  result["reduced_bytes"] = statistics.reduced_bytes;
  result["copied_bytes"] = copied;
  return result;
}

}  // namespace

void bind_reducer(py::module_& module) {
  using NoGil = py::call_guard<py::gil_scoped_release>;
  py::class_<Reducer, std::shared_ptr<Reducer>>(module, "Reducer")
      .def(py::init(&make_reducer), py::arg("parameters"), py::arg("model_name"), py::arg("parameter_names"),
           py::arg("communicator"), py::arg("find_unused_parameters"), py::arg("gradients_in_arena"), NoGil())
      .def("begin_forward", &Reducer::begin_forward, py::arg("synchronize"), NoGil())
      .def("prepare_for_backward", &Reducer::prepare_for_backward, py::arg("outputs"), NoGil())
      .def("install_plan", &Reducer::install_plan, py::arg("buckets"), py::arg("provisional"), NoGil())
      .def("ready_order", &Reducer::ready_order, NoGil())
      .def("check_finalized", &Reducer::check_finalized, NoGil())
      .def("remove_hooks", &Reducer::remove_hooks, NoGil())
      .def("statistics", &statistics_dict);
}

}  // namespace syncengine
