#include "reducer/python_error.h"

#include <torch/csrc/Exceptions.h>

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
    PyErr_SetObject(type.ptr(), type(error.what()).ptr());
    throw_current_python_error();
  }
}

void raise_pending_signal() {
  pybind11::gil_scoped_acquire gil;
  if (PyErr_CheckSignals() != 0) throw_current_python_error();
}

}  // namespace syncengine
