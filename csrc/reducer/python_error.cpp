#include "reducer/python_error.h"

#include <torch/csrc/Exceptions.h>

#include <string_view>

#include "base/error.h"

namespace syncengine {

namespace {

[[noreturn]] void throw_current_python_error() {
  python_error error;
  error.persist();
  throw error;
}

}  // namespace

void rethrow_for_autograd() {
  try {
    throw;
  } catch (const Error& error) {
    pybind11::gil_scoped_acquire gil;
    auto type = pybind11::module_::import("syncengine.errors").attr(name(error.kind()));
    // A peer's text may have been cut in the middle of a character.
    std::string_view bytes = error.what();
    auto text = pybind11::reinterpret_steal<pybind11::object>(
        PyUnicode_DecodeUTF8(bytes.data(), static_cast<Py_ssize_t>(bytes.size()), "replace"));
    if (text) PyErr_SetObject(type.ptr(), type(text).ptr());
    throw_current_python_error();
  }
}

void raise_pending_signal() {
  pybind11::gil_scoped_acquire gil;
  if (PyErr_CheckSignals() != 0) throw_current_python_error();
}

}  // namespace syncengine
