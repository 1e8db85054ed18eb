#include <pybind11/stl.h>
#include <torch/csrc/Exceptions.h>

#include "base/build_id.h"
#include "base/descriptors.h"
#include "base/error.h"
#include "base/memory.h"
#include "base/phase_clock.h"
#include "base/resources.h"
#include "base/say.h"
#include "base/sync_point.h"
#include "base/trace.h"
#include "bindings/bindings.h"
#include "bootstrap/host.h"
#include "cuda/device_group.h"
#include "kernels/reduce.h"
#include "reducer/torch/python_error.h"
#include "transport/shm/arena.h"
#include "transport/tcp/address.h"

namespace py = pybind11;
using namespace py::literals;

namespace syncengine {

namespace {

void translate_errors() {
  py::register_exception_translator([](std::exception_ptr pointer) {
    try {
      if (pointer) std::rethrow_exception(pointer);
    } catch (const Error& error) {
      set_python_error(error);
    } catch (python_error& error) {  // such as Ctrl-C
      error.restore();
    }
  });
}

// The machine as the engine sees it, for `syncengine doctor`: what this process may use of it.
py::dict machine() {
  return py::dict("available_cores"_a = available_cores(), "available_memory"_a = available_memory(),
                  "total_memory"_a = total_memory(), "open_descriptors"_a = open_descriptors(),
                  "most_descriptors"_a = most_descriptors(),
                  "best_instruction_set"_a = kernels::name(kernels::best_isa()));
}

std::vector<std::pair<std::string, std::string>> network_interfaces() {
  std::vector<std::pair<std::string, std::string>> result;
  for (const auto& [name, ip] : tcp::local_interfaces()) result.emplace_back(name, ip.text());
  return result;
}

void probe_shared_memory(size_t bytes) {
  const UniqueFd memory = create_sealed_memfd("syncengine-probe", bytes);
  const Mapping mapping(memory.get(), bytes);
}

// The ways in which processes of this machine see each other's death, the quickest first.
std::vector<std::string> death_notices() {
  std::vector<std::string> ways;
  if (shm::tells_of_deaths()) ways.emplace_back("robust futexes");
  if (ProcessWatch(process_id()).sees()) ways.emplace_back("process handles");
  return ways;
}

void bind_machine(py::module_& module) {
  module.def("machine", &machine);
  module.def("network_interfaces", &network_interfaces);
  module.def("host_key", &host_key, py::arg("host_id"));
  module.def("death_notices", &death_notices);
  module.def("throw_system_error", &throw_system_error, py::arg("text"), py::arg("code"), py::arg("call"));
  module.def("probe_shared_memory", &probe_shared_memory, py::arg("bytes"));
  module.def("instruction_set", [] { return kernels::name(kernels::active_isa()); });
  module.attr("build_id") = py::str("{:016x}").format(build_id());
  module.attr("has_cuda") = cuda::is_built();
  module.attr("has_test_hooks") = has_test_hooks();
}

// Defines functions for tracing and for lines on stderr, and hooks of torch's optimizers by which the engine learns of
// the optimizer's phase of a step, which only Python sees. The hooks ignore their arguments.
void bind_recorder(py::module_& module) {
  using NoGil = py::call_guard<py::gil_scoped_release>;
  module.def("start_trace", &trace::start, py::arg("path"), py::arg("events"), py::arg("about"), py::arg("steps"),
             NoGil());
  module.def("stop_trace", &trace::stop, NoGil());
  module.def("trace_path", &trace::path, NoGil());
  module.def("trace_now", &trace::now);
  module.def("say", [](const Text& lines) { say(lines); }, py::arg("lines"));
  module.def("await_said", &await_said, NoGil());
  module.def("begin_optimizer", [](const py::args&) { PhaseClock::of_process().begin_optimizer(); });
  module.def("end_optimizer", [](const py::args&) { PhaseClock::of_process().end_optimizer(); });
}

}  // namespace

}  // namespace syncengine

PYBIND11_MODULE(TORCH_EXTENSION_NAME, module) {
  module.doc() = "syncengine's engine: collectives, communicators and the gradient reducer.";
  syncengine::translate_errors();
  syncengine::bind_communicator(module);
  syncengine::bind_packet_transports(module);
  syncengine::bind_local_bootstrap(module);
  syncengine::bind_common_memory(module);
  syncengine::bind_reducer(module);
  syncengine::bind_backend(module);
  syncengine::bind_machine(module);
  syncengine::bind_recorder(module);
}
