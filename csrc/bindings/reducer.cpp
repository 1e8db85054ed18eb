// syncengine._C.Reducer
#include <pybind11/stl.h>
#include <torch/csrc/Exceptions.h>
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

void shadow_backward(Reducer& reducer) {
  try {
    py::gil_scoped_release no_gil;
    reducer.shadow_backward();
  } catch (python_error& error) {  // Ctrl-C, in the form that autograd wants
    error.restore();
    throw py::error_already_set();
  }
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

py::dict timeline_dict(const Reducer& reducer) {
  Timeline timeline;
  {
    py::gil_scoped_release no_gil;
    timeline = reducer.timeline();
  }
  const auto& step = timeline.last();
  const auto& totals = timeline.totals();
  auto average = [&](int64_t total) { return totals.steps ? total / totals.steps : 0; };
  py::dict result;
  result["steps"] = totals.steps;
  result["forward_start"] = step.forward_start;
  result["backward_start"] = step.backward_start;
  result["backward_end"] = step.backward_end;
  result["comm_start"] = step.comm_start;
  result["comm_end"] = step.comm_end;
  result["ready"] = step.ready;
  result["forward"] = std::make_pair(step.forward(), average(totals.forward));
  result["backward"] = std::make_pair(step.backward(), average(totals.backward));
  result["comm"] = std::make_pair(step.comm(), average(totals.comm));
  result["overlap"] = std::make_pair(step.overlap(), average(totals.overlap));
  return result;
}

}  // namespace

void bind_reducer(py::module_& module) {
  using NoGil = py::call_guard<py::gil_scoped_release>;
  py::class_<Reducer, std::shared_ptr<Reducer>>(module, "Reducer")
      .def(py::init(&make_reducer), py::arg("parameters"), py::arg("model_name"), py::arg("parameter_names"),
           py::arg("communicator"), py::arg("find_unused_parameters"), py::arg("gradients_in_arena"), NoGil())
      .def("begin_forward", &Reducer::begin_forward, py::arg("synchronize"), NoGil())
      .def("prepare_for_local_backward", &Reducer::prepare_for_local_backward, py::arg("outputs"), NoGil())
      .def("prepare_for_backward", &Reducer::prepare_for_backward, py::arg("outputs"), NoGil())
      .def("install_plan", &Reducer::install_plan, py::arg("buckets"), py::arg("provisional"), NoGil())
      .def("ready_order", &Reducer::ready_order, NoGil())
      .def("average_over", &Reducer::average_over, py::arg("divisor"), py::arg("weight"), NoGil())
      .def("shadow_backward", &shadow_backward)
      .def("check_finalized", &Reducer::check_finalized, NoGil())
      .def("remove_hooks", &Reducer::remove_hooks, NoGil())
      .def("timeline", &timeline_dict)
      .def("set_sample_rate", &Reducer::set_sample_rate, py::arg("rate"), NoGil())
      .def("statistics", &statistics_dict);
}

}  // namespace syncengine
