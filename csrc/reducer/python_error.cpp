#include "reducer/python_error.h"

#include <torch/csrc/Exceptions.h>

#include <string_view>

namespace syncengine {

namespace {

[[noreturn]] void throw_current_python_error() {
  python_error error;
  error.persist();
  throw error;
}

}  // namespace

pybind11::object to_python(const Error& error) {
  std::string_view bytes = error.what();
  // A peer's text may have been cut in the middle of a character.
  auto text = pybind11::reinterpret_steal<pybind11::object>(
      PyUnicode_DecodeUTF8(bytes.data(), static_cast<Py_ssize_t>(bytes.size()), "replace"));
  if (!text) throw pybind11::error_already_set();
  return pybind11::module_::import("syncengine.errors").attr(name(error.kind()))(text);
}

void set_python_error(const Error& error) {
  try {
    pybind11::object raised = to_python(error);
    PyErr_SetObject(reinterpret_cast<PyObject*>(Py_TYPE(raised.ptr())), raised.ptr());
  } catch (pybind11::error_already_set& other) {
    other.restore();
  }
}

void rethrow_for_autograd() {
  try {
    throw;
  } catch (const Error& error) {
    pybind11::gil_scoped_acquire gil;
    set_python_error(error);
    throw_current_python_error();
  }
}

void raise_pending_signal() {
  pybind11::gil_scoped_acquire gil;
  if (PyErr_CheckSignals() != 0) throw_current_python_error();
}

}  // namespace syncengine
