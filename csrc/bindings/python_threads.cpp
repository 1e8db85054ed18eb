#include "bindings/python_threads.h"

#include "bindings/bindings.h"
#include "engine/progress/engine.h"

namespace py = pybind11;

namespace syncengine {

namespace {

// Threads that many programs have and that run nobody's code, by the module of their function or class: a DataLoader's
// queues have one per worker, and it has one that pins memory; a process has one that has sent tensors to another;
// loggers, and tqdm.
constexpr const char* kHelpers[] = {"multiprocessing.queues",
                                    "multiprocessing.resource_sharer",
                                    "torch.utils.data._utils.pin_memory",
                                    "logging.handlers",
                                    "tensorboard.summary.writer.event_file_writer",
                                    "tqdm._monitor"};

bool is_helper(py::handle thread) {
  for (py::handle owner : {py::object(py::getattr(thread, "_target", py::none())), py::object(py::type::of(thread))}) {
    auto module = py::str(py::getattr(owner, "__module__", py::none())).cast<std::string>();
    for (const char* helper : kHelpers) {
      if (module == helper) return true;
    }
  }
  return false;
}

int count_helpers() {
  int count = 0;
  // Not enumerate(), which takes a lock that this very thread may hold.
  for (py::handle thread : py::list(py::module_::import("threading").attr("_active").attr("values")()))
    count += is_helper(thread);
  return count;
}

}  // namespace

int count_python_threads() {
  if (PyGILState_GetThisThreadState() == nullptr) return kUnknownCallers;
  py::gil_scoped_acquire gil;
  int count = 0;
  for (auto* interpreter = PyInterpreterState_Head(); interpreter; interpreter = PyInterpreterState_Next(interpreter)) {
    for (auto* thread = PyInterpreterState_ThreadHead(interpreter); thread; thread = PyThreadState_Next(thread))
      ++count;
  }
  if (count == 1) return count;
  try {
    return count - count_helpers();
  } catch (const py::error_already_set&) {
    return kUnknownCallers;
  }
}

}  // namespace syncengine
