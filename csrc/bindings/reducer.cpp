// syncengine._C.Reducer, with the classes around it, and the communication hooks that it calls.

#include <pybind11/numpy.h>
#include <pybind11/stl.h>
#include <torch/csrc/jit/python/pybind_utils.h>
#include <torch/csrc/utils/pybind.h>

#include <array>
#include <stdexcept>
#include <string>
#include <torch/csrc/distributed/c10d/comm.hpp>

#include "bindings/bindings.h"
#include "collectives/order.h"
#include "reducer/buckets/bucket_lane.h"
#include "reducer/gradients/gradient_memory.h"
#include "reducer/reducer.h"
#include "reducer/torch/weights.h"

namespace py = pybind11;
using namespace py::literals;

namespace syncengine {

namespace {

// A communication hook written in Python, as the reducer calls it. torch has such a class (c10d::PythonCommHook), but
// it crashes on a hook that returns None.
//
// Thread-safety: the GIL is taken inside. Failure: Python's exceptions.
class PythonHook final : public c10d::CommHookInterface {
 public:
  PythonHook(py::object state, py::object hook) : state_(std::move(state)), hook_(std::move(hook)) {}
  ~PythonHook() override {
    py::gil_scoped_acquire gil;
    state_ = {};
    hook_ = {};
  }

  c10::intrusive_ptr<c10::ivalue::Future> runHook(c10d::GradBucket& bucket) override {
    py::gil_scoped_acquire gil;
    py::object result = hook_(state_, bucket);
    if (!py::isinstance<torch::jit::PythonFutureWrapper>(result)) {
      throw std::runtime_error("a communication hook's callback must return a torch.futures.Future object, not " +
                               type_name(result));
    }
    return result.cast<std::shared_ptr<torch::jit::PythonFutureWrapper>>()->fut;
  }

  at::Tensor parseHookResult(const c10::IValue& result) override {
    if (!result.isPyObject()) return c10d::detail::parseCppCommHookResult(result);
    py::gil_scoped_acquire gil;
    py::object value = torch::jit::toPyObject(result);
    if (THPVariable_Check(value.ptr())) return value.cast<at::Tensor>();
    if (PyExceptionInstance_Check(value.ptr())) {  // how torch.futures.Future.set_exception keeps it
      PyErr_SetObject(reinterpret_cast<PyObject*>(Py_TYPE(value.ptr())), value.ptr());
      throw py::error_already_set();
    }
    throw std::runtime_error("the future of a communication hook must hold a tensor, not " + type_name(value));
  }

 private:
  static std::string type_name(const py::handle& object) {
    return py::str(py::type::handle_of(object).attr("__name__")).cast<std::string>();
  }

  py::object state_, hook_;
};

std::unique_ptr<BucketLane> make_lane(const std::vector<at::Tensor>& parameters,
                                      const std::shared_ptr<Communicator>& communicator, bool flat_buckets) {
  if (!parameters.empty() && !parameters[0].is_cpu()) return make_device_lane(communicator, parameters[0].device());
  return flat_buckets ? std::make_unique<HostMemoryLane>(communicator) : nullptr;
}

std::shared_ptr<Reducer> make_reducer(std::vector<at::Tensor> parameters, Text model_name,
                                      const std::vector<Text>& parameter_names,
                                      const std::shared_ptr<Communicator>& communicator,
                                      const std::vector<bool>& sparse, const ReducerOptions& options) {
  if (parameters.size() != parameter_names.size() || parameters.size() != sparse.size()) {
    throw Error(ErrorKind::InvalidUsage, "Reducer needs one name and one layout for each parameter");
  }
  const py::gil_scoped_release no_gil;  // until the return, as pybind11 needs the GIL to register the object
  auto lane = make_lane(parameters, communicator, options.flat_buckets);
  auto reducer = std::make_shared<Reducer>(
      std::move(parameters), ModelNames{std::move(model_name), {parameter_names.begin(), parameter_names.end()}},
      communicator, sparse, options, std::move(lane));
  reducer->follow_parameters();  // one may be frozen for the first forward, and not for its backward
  return reducer;
}

void set_comm_hook(Reducer& reducer, py::object state, py::object hook) {
  auto python_hook = std::make_unique<PythonHook>(std::move(state), std::move(hook));
  py::gil_scoped_release no_gil;
  reducer.set_comm_hook(std::move(python_hook));
}

void install_futures(Reducer& reducer, const std::vector<std::shared_ptr<torch::jit::PythonFutureWrapper>>& futures) {
  std::vector<TorchFuture> unwrapped;
  for (const auto& future : futures) unwrapped.push_back(future->fut);
  py::gil_scoped_release no_gil;
  reducer.install_futures(unwrapped);
}

py::dict statistics_dict(Reducer& reducer) {
  const auto [statistics, shortage] = [&] {
    py::gil_scoped_release no_gil;
    return std::pair(reducer.statistics(), reducer.shortage());
  }();
  auto by_name = [](const auto& names, const auto& bytes) {
    py::dict result;
    for (size_t i = 0; i < names.size(); ++i) result[names[i]] = bytes[i];
    return result;
  };
  return py::dict("backwards"_a = statistics.backwards, "buckets"_a = statistics.buckets,
                  "reduced_bytes"_a = statistics.reduced_bytes,
                  "copied_bytes"_a = by_name(kCopyReasons, statistics.copied_bytes),
                  "staged_bytes"_a = by_name(kStageReasons, statistics.staged_bytes), "shortage"_a = shortage);
}

py::tuple summary_tuple(const StepTimes& times) {
  const StepTimes::Summary summary = times.summary();
  constexpr size_t kTimes = sizeof(StepTimes::Step) / sizeof(int64_t);
  const auto* of_steps = reinterpret_cast<const int64_t*>(summary.last.data());
  return py::make_tuple(summary.steps, summary.bytes,
                        py::array_t<int64_t>(std::array{summary.last.size(), kTimes}, of_steps), summary.stamps);
}

}  // namespace

void bind_reducer(py::module_& module) {
  py::class_<WatchedWeights>(module, "WatchedWeights")
      .def(py::init<std::vector<at::Tensor>>(), py::arg("parameters"))
      .def("note", &WatchedWeights::note)
      .def("note_update", &WatchedWeights::note_update)
      .def("moved", &WatchedWeights::moved)
      .def("written", &WatchedWeights::written)
      .def("gradients", [](const WatchedWeights& self) { return py::bytes(self.gradients()); });

  py::class_<WeightSlices>(module, "WeightSlices")
      .def(py::init([](const std::vector<std::tuple<at::Tensor, at::Tensor, int64_t>>& slices) {
             std::vector<WeightSlices::Slice> made;
             for (const auto& [parameter, tensor, begin] : slices) made.push_back({parameter, tensor, begin});
             return WeightSlices(std::move(made));
           }),
           py::arg("slices"))
      .def("take_gradients", &WeightSlices::take_gradients)
      .def("drop_gradients", &WeightSlices::drop_gradients);

  using NoGil = py::call_guard<py::gil_scoped_release>;
  py::class_<ReducerOptions>(module, "ReducerOptions")
      .def(py::init<>())
      .def_readwrite("find_unused_parameters", &ReducerOptions::find_unused_parameters)
      .def_readwrite("static_graph", &ReducerOptions::static_graph)
      .def_readwrite("skip_all_reduce_unused_params", &ReducerOptions::skip_all_reduce_unused_params)
      .def_readwrite("gradient_as_bucket_view", &ReducerOptions::gradient_as_bucket_view)
      .def_readwrite("batched_grad_copy", &ReducerOptions::batched_grad_copy)
      .def_readwrite("waits_in_between", &ReducerOptions::waits_in_between)
      .def_readwrite("nonfinite", &ReducerOptions::nonfinite)
      .def_readwrite("flat_buckets", &ReducerOptions::flat_buckets);
  py::class_<StepTimes, std::shared_ptr<StepTimes>>(module, "StepTimes")
      .def(py::init<>())
      .def("summary", &summary_tuple);
  module.def("note_incoming", &note_incoming, py::arg("parameters"));
  module.def("owns_gradient", &owns_gradient, py::arg("parameter"));
  py::class_<NodeNumber>(module, "NodeNumber").def(py::init(&NodeNumber::now));
  module.def(
      "cut_tree",
      [](uint32_t leaves, int ranks) {
        const TreeCut cut = cut_tree(leaves, ranks);
        return std::pair(cut.begins, std::vector<int>(cut.merges.begin(), cut.merges.end()));
      },
      py::arg("leaves"), py::arg("ranks"));
  py::class_<TreeSums, std::shared_ptr<TreeSums>>(module, "TreeSums")
      .def(py::init<std::vector<at::Tensor>>(), py::arg("parameters"))
      .def("take", &TreeSums::take, py::arg("merges"), NoGil())
      .def("deliver", &TreeSums::deliver, py::arg("divisor"), NoGil());
  py::class_<Reducer, std::shared_ptr<Reducer>>(module, "Reducer", py::release_gil_before_calling_cpp_dtor())
      .def(py::init(&make_reducer), py::arg("parameters"), py::arg("model_name"), py::arg("parameter_names"),
           py::arg("communicator"), py::arg("sparse"), py::arg("options"))
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
      .def(
          "refuse_forward", [](Reducer& self, const Text& text, bool voted) { self.refuse_forward(text, voted); },
          py::arg("text"), py::arg("voted") = false, NoGil())
      .def("can_refuse", &Reducer::can_refuse, NoGil())
      .def("vote_on_forward", &Reducer::vote_on_forward, NoGil())
      .def("is_undecided", &Reducer::is_undecided, NoGil())
      .def("decide", &Reducer::decide, NoGil())
      .def("reserve_slots", &Reducer::reserve_slots, py::arg("copy_of") = py::none(), NoGil())
      .def("shadow_backward", &Reducer::shadow_backward, NoGil())
      .def("check_finalized", &Reducer::check_finalized, NoGil())
      .def("remove_hooks", &Reducer::remove_hooks, NoGil())
      .def("has_averaged", &Reducer::has_averaged, NoGil())
      .def("wanted", &Reducer::wanted, NoGil())
      .def("install_plan", &Reducer::install_plan, py::arg("buckets"), py::arg("provisional"), NoGil())
      .def("average_over", &Reducer::average_over, py::arg("divisor"), py::arg("weight"), NoGil())
      .def("expect_shadows", &Reducer::expect_shadows, NoGil())
      .def("complete_step", &Reducer::complete_step, py::arg("sums"), py::arg("total"), py::arg("number"), NoGil())
      .def("end_step", &Reducer::end_step, NoGil())
      .def("drop_step", &Reducer::drop_step, NoGil())
      .def("backwards", &Reducer::backwards, NoGil())
      .def("install_futures", &install_futures, py::arg("futures"))
      .def("set_comm_hook", &set_comm_hook, py::arg("state"), py::arg("hook"))
      .def("set_compression", &Reducer::set_compression, py::arg("dtype"), py::arg("divides_first") = true, NoGil())
      .def("set_all_reduce_hook", &Reducer::set_all_reduce_hook, NoGil())
      .def("set_static_graph", &Reducer::set_static_graph, NoGil())
      .def("last_error", &Reducer::last_error, NoGil())
      .def("not_averaged", &Reducer::not_averaged, NoGil())
      .def("ready_order", &Reducer::ready_order, NoGil())
      .def("knows_order", &Reducer::knows_order, NoGil())
      .def("graph_is_static", &Reducer::graph_is_static, NoGil())
      .def("step_times", &Reducer::step_times, NoGil())
      .def("statistics", &statistics_dict);
}

}  // namespace syncengine
