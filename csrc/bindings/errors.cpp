#include "bindings/errors.h"

#include <string_view>

#include "bindings/bindings.h"

namespace py = pybind11;

namespace syncengine {

py::object error_class(ErrorKind kind) { return py::module_::import("syncengine.errors").attr(name(kind)); }

// A peer's text may have been cut in the middle of a character.
py::object to_python(const Error& error) {
  std::string_view text = error.what();
  auto decoded = py::reinterpret_steal<py::object>(
      PyUnicode_DecodeUTF8(text.data(), static_cast<Py_ssize_t>(text.size()), "replace"));
  if (!decoded) throw py::error_already_set();
  return error_class(error.kind())(decoded);
}

void set_python_error(const Error& error) {
  py::object raised = to_python(error);
  PyErr_SetObject(reinterpret_cast<PyObject*>(Py_TYPE(raised.ptr())), raised.ptr());
}

std::function<void()> check_signals() {
  return [] {
    py::gil_scoped_acquire gil;
    if (PyErr_CheckSignals() != 0) throw py::error_already_set();
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
