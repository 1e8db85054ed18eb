// Tracing, and the phases of a step that only Python sees.
#include <pybind11/pybind11.h>

#include <string>

#include "base/phase_clock.h"
#include "base/trace.h"
#include "bindings/bindings.h"

namespace py = pybind11;

namespace syncengine {

namespace {

// Hooks of torch's optimizers: what they are called with is of no interest.
void begin_optimizer(const py::args& /*of_the_step*/) { PhaseClock::of_process().begin_optimizer(); }
void end_optimizer(const py::args& /*of_the_step*/) { PhaseClock::of_process().end_optimizer(); }

}  // namespace

void bind_recorder(py::module_& module) {
  using NoGil = py::call_guard<py::gil_scoped_release>;
  module.def("start_trace", &trace::start, py::arg("path"), py::arg("events"), py::arg("about"), py::arg("steps"),
             NoGil());
  module.def("stop_trace", &trace::stop, NoGil());
  module.def("trace_path", &trace::path, NoGil());
  module.def("trace_now", &trace::now);
  module.def("begin_optimizer", &begin_optimizer);
  module.def("end_optimizer", &end_optimizer);
}

}  // namespace syncengine
