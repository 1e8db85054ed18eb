#include "bindings/errors.h"

#include "base/error.h"
#include "bindings/bindings.h"
#include "reducer/torch/python_error.h"

namespace py = pybind11;

namespace syncengine {

std::function<void()> check_signals() {
  return [] {
    py::gil_scoped_acquire gil;
    if (PyErr_CheckSignals() == 0) return;
    py::error_already_set error;
    std::string text = interruption_text(error.type(), error.value());
    throw RaisedInWait<py::error_already_set>(std::move(error), std::move(text));
  };
}

void bind_errors(py::module_&) {
  py::register_exception_translator([](std::exception_ptr pointer) {
    try {
      if (pointer) std::rethrow_exception(pointer);
    } catch (const Error& error) {
      set_python_error(error);
    }
  });
}

}  // namespace syncengine
