// syncengine._C.Reducer
#include <pybind11/stl.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/jit/python/pybind_utils.h>
#include <torch/csrc/utils/pybind.h>

#include "bindings/bindings.h"
#include "bindings/python_hook.h"
#include "reducer/backward/backward.h"
#include "reducer/buckets/device_lane.h"
#include "reducer/gradients/exclusive.h"
#include "reducer/reducer.h"

#ifdef SYNCENGINE_TEST_HOOKS
#include "reducer/buckets/host_memory_lane.h"
#endif

namespace syncengine {

namespace py = pybind11;
using namespace py::literals;

namespace {

#ifdef SYNCENGINE_TEST_HOOKS
std::unique_ptr<BucketLane> make_host_memory_lane(const std::shared_ptr<Communicator>& communicator) {
  return std::make_unique<HostMemoryLane>(communicator);
}
#else
std::unique_ptr<BucketLane> make_host_memory_lane(const std::shared_ptr<Communicator>&) {
  throw Error(ErrorKind::InvalidUsage, "flat_buckets are for tests: build with SYNCENGINE_TEST_HOOKS=1");
}
#endif

std::unique_ptr<BucketLane> make_lane(const std::vector<at::Tensor>& parameters,
                                      const std::shared_ptr<Communicator>& communicator, bool flat_buckets) {
  if (!parameters.empty() && !parameters[0].is_cpu()) return make_device_lane(communicator, parameters[0].device());
  return flat_buckets ? make_host_memory_lane(communicator) : nullptr;
}

std::shared_ptr<Reducer> make_reducer(std::vector<at::Tensor> parameters, std::string model_name,
                                      std::vector<std::string> parameter_names,
                                      const std::shared_ptr<Communicator>& communicator,
                                      const std::vector<bool>& sparse, ReducerOptions options) {
  if (parameters.size() != parameter_names.size() || parameters.size() != sparse.size()) {
    throw Error(ErrorKind::InvalidUsage, "Reducer needs one name and one layout for each parameter");
  }
  auto lane = make_lane(parameters, communicator, options.flat_buckets);
  if (lane) options.gradients_in_arena = false;
  auto reducer = std::make_shared<Reducer>(
      std::make_unique<Model>(std::move(parameters), ModelNames{std::move(model_name), std::move(parameter_names)},
                              communicator, sparse, options, std::move(lane)));
  reducer->model()->parameters.follow(reducer);  // one may be frozen for the first forward, and not for its backward
  return reducer;
}

void set_comm_hook(Reducer& reducer, py::object state, py::object hook) {
  auto python_hook = std::make_unique<PythonHook>(std::move(state), std::move(hook));
  py::gil_scoped_release no_gil;
  reducer.model()->routing_for_hook().set_comm_hook(std::move(python_hook));
}

void set_compression(Reducer& reducer, at::ScalarType dtype, bool divides_first) {
  using Divides = Compression::Divides;
  reducer.model()->routing_for_hook().set_compression(
      Compression(dtype, divides_first ? Divides::First : Divides::Last));
}

void install_futures(Reducer& reducer, const std::vector<std::shared_ptr<torch::jit::PythonFutureWrapper>>& futures) {
  std::vector<TorchFuture> unwrapped;
  for (const auto& future : futures) unwrapped.push_back(future->fut);
  py::gil_scoped_release no_gil;
  reducer.model()->coming_backward().wait_at_end_for(std::move(unwrapped));
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

py::dict statistics_dict(Reducer& reducer) {
  Statistics statistics;
  {
    py::gil_scoped_release no_gil;
    const auto model = reducer.model();
    statistics = model->record.statistics;
    if (const auto* pool = model->pooled.pool()) statistics.shortage = pool->shortage();
  }
  auto by_name = [](const auto& names, const auto& bytes) {
    py::dict result;
    for (size_t i = 0; i < names.size(); ++i) result[names[i]] = bytes[i];
    return result;
  };
  return py::dict(
      "backwards"_a = statistics.backwards, "buckets"_a = statistics.buckets,
      "reduced_bytes"_a = statistics.reduced_bytes, "copied_bytes"_a = by_name(kCopyReasons, statistics.copied_bytes),
      "staged_bytes"_a = by_name(kStageReasons, statistics.staged_bytes), "shortage"_a = statistics.shortage);
}

py::dict timeline_dict(Reducer& reducer) {
  Timeline timeline;
  {
    py::gil_scoped_release no_gil;
    timeline = reducer.model()->record.timeline;
  }
  const auto& step = timeline.last();
  const auto& totals = timeline.totals();
  auto average = [&](int64_t total) { return totals.steps ? total / totals.steps : 0; };
  return py::dict("steps"_a = totals.steps, "forward_start"_a = step.forward_start,
                  "backward_start"_a = step.backward_start, "backward_end"_a = step.backward_end,
                  "comm_start"_a = step.comm_start, "comm_end"_a = step.comm_end,
                  "forward"_a = std::pair(step.forward(), average(totals.forward)),
                  "backward"_a = std::pair(step.backward(), average(totals.backward)),
                  "comm"_a = std::pair(step.comm(), average(totals.comm)),
                  "overlap"_a = std::pair(step.overlap(), average(totals.overlap)));
}

py::dict summary_dict(const StepTimes& times) {
  const StepTimes::Summary summary = times.summary();
  return py::dict("steps"_a = summary.steps, "bytes"_a = summary.bytes, "median"_a = summary.median,
                  "median_wait"_a = summary.median_wait);
}

}  // namespace

void bind_reducer(py::module_& module) {
  using NoGil = py::call_guard<py::gil_scoped_release>;
  py::class_<ReducerOptions>(module, "ReducerOptions")
      .def(py::init<>())
      .def_readwrite("find_unused_parameters", &ReducerOptions::find_unused_parameters)
      .def_readwrite("static_graph", &ReducerOptions::static_graph)
      .def_readwrite("skip_all_reduce_unused_params", &ReducerOptions::skip_all_reduce_unused_params)
      .def_readwrite("gradient_as_bucket_view", &ReducerOptions::gradient_as_bucket_view)
      .def_readwrite("batched_grad_copy", &ReducerOptions::batched_grad_copy)
      .def_readwrite("waits_in_between", &ReducerOptions::waits_in_between)
      .def_readwrite("gradients_in_arena", &ReducerOptions::gradients_in_arena)
      .def_readwrite("flat_buckets", &ReducerOptions::flat_buckets);
  py::class_<StepTimes, std::shared_ptr<StepTimes>>(module, "StepTimes").def("summary", &summary_dict);
  module.def("note_incoming", &note_incoming, py::arg("parameters"), "Lets owns_gradient() know what autograd brings.");
  module.def("owns_gradient", &owns_gradient, py::arg("parameter"), "Whether .grad alone looks at its memory.");
  py::class_<NodeNumber>(module, "NodeNumber").def(py::init(&NodeNumber::now));
  py::class_<Reducer, std::shared_ptr<Reducer>>(module, "Reducer", py::release_gil_before_calling_cpp_dtor())
      .def(py::init(&make_reducer), py::arg("parameters"), py::arg("model_name"), py::arg("parameter_names"),
           py::arg("communicator"), py::arg("sparse"), py::arg("options"), NoGil())
      .def("begin_forward", &Reducer::begin_forward, py::arg("synchronize"), NoGil())
      .def("follow_parameters", &Reducer::follow_parameters, NoGil())
      .def("prepare_for_local_backward", &Reducer::prepare_for_local_backward, py::arg("outputs"), py::arg("began"),
           NoGil())
      .def(
          "prepare_for_backward",
          [](Reducer& self, const std::vector<at::Tensor>& outputs, const std::optional<NodeNumber>& began) {
            return self.prepare_for_backward(outputs, began.value_or(NodeNumber()));
          },
          py::arg("outputs"), py::arg("began") = py::none(), NoGil())
      .def("abandon_forward", &Reducer::abandon_forward, py::arg("text"), NoGil())
      .def("refuse_forward", &Reducer::refuse_forward, py::arg("text"), NoGil())
      .def("reserve_slots", &Reducer::reserve_slots, py::arg("copy_of") = py::none(), NoGil())
      .def("shadow_backward", &shadow_backward)
      .def("check_finalized", &Reducer::check_finalized, NoGil())
      .def("remove_hooks", &Reducer::remove_hooks, NoGil())
      .def("has_averaged", &Reducer::has_averaged, NoGil())
      .def(
          "wanted", [](Reducer& self) { return self.model()->parameters.wanted(); }, NoGil())
      .def(
          "install_plan",
          [](Reducer& self, const std::vector<std::vector<size_t>>& buckets, bool provisional) {
            self.model()->install_plan(buckets, provisional);
          },
          py::arg("buckets"), py::arg("provisional"), NoGil())
      .def(
          "average_over",
          [](Reducer& self, double divisor, double weight) {
            self.model()->coming_forward().weighting = {.divisor = divisor, .weight = weight, .given = true};
          },
          py::arg("divisor"), py::arg("weight"), NoGil())
      .def(
          "expect_shadows", [](Reducer& self) { self.model()->coming_forward().has_shadows = true; }, NoGil())
      .def("install_futures", &install_futures, py::arg("futures"))
      .def("set_comm_hook", &set_comm_hook, py::arg("state"), py::arg("hook"))
      .def("set_compression", &set_compression, py::arg("dtype"), py::arg("divides_first") = true, NoGil())
      .def(
          "set_all_reduce_hook", [](Reducer& self) { self.model()->routing_for_hook().set_all_reduce_hook(); }, NoGil())
      .def(
          "set_static_graph", [](Reducer& self) { self.model()->set_static_graph(); }, NoGil())
      .def(
          "watch_local_backwards", [](Reducer& self) { self.model()->outcome.watches_local_backwards = true; }, NoGil())
      .def(
          "last_error", [](Reducer& self) { return self.model()->outcome.last_error; }, NoGil())
      .def(
          "not_averaged", [](Reducer& self) { return self.model()->outcome.not_averaged; }, NoGil())
      .def(
          "ready_order", [](Reducer& self) { return self.model()->record.ready_order; }, NoGil())
      .def(
          "knows_order", [](Reducer& self) { return self.model()->plan.knows_order(); }, NoGil())
      .def(
          "graph_is_static", [](Reducer& self) { return self.model()->record.graph_is_static; }, NoGil())
      .def(
          "set_sample_rate", [](Reducer& self, uint64_t rate) { self.model()->record.timeline.set_sample_rate(rate); },
          py::arg("rate"), NoGil())
      .def(
          "step_times", [](Reducer& self) { return self.model()->record.step_times; }, NoGil())
      .def("timeline", &timeline_dict)
      .def("statistics", &statistics_dict);
}

}  // namespace syncengine
