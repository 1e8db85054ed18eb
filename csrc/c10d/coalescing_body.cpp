#include "c10d/coalescing_body.h"

#include <frameobject.h>
#include <pybind11/pybind11.h>
#include <torch/csrc/Exceptions.h>

#include <utility>

namespace syncengine {

namespace {

PyObject* generator_of(PyFrameObject* frame) {
#if PY_VERSION_HEX >= 0x030B0000
  return PyFrame_GetGenerator(frame);
#else
  Py_XINCREF(frame->f_gen);
  return frame->f_gen;
#endif
}

int raise_postponed(void* error) {
  PyErr_SetObject(reinterpret_cast<PyObject*>(Py_TYPE(error)), static_cast<PyObject*>(error));
  Py_DECREF(static_cast<PyObject*>(error));
  return -1;
}

}  // namespace

std::unique_ptr<CoalescingBody> CoalescingBody::of_caller(std::function<void()> left) {
  if (!Py_IsInitialized()) return nullptr;
  pybind11::gil_scoped_acquire gil;
  PyFrameObject* frame = PyEval_GetFrame();
  auto generator = pybind11::reinterpret_steal<pybind11::object>(frame ? generator_of(frame) : nullptr);
  if (!generator) return nullptr;
  pybind11::cpp_function callback([left = std::move(left)](pybind11::handle) {
    pybind11::gil_scoped_release nogil;  // what it waits for may need the GIL
    left();
  });
  return std::unique_ptr<CoalescingBody>(new CoalescingBody(pybind11::weakref(generator, callback).release().ptr()));
}

CoalescingBody::~CoalescingBody() {
  if (!Py_IsInitialized()) return;
  pybind11::gil_scoped_acquire gil;
  Py_DECREF(static_cast<PyObject*>(reference_));
}

bool CoalescingBody::has_ended() const {
  pybind11::gil_scoped_acquire gil;
  const auto generator = pybind11::reinterpret_borrow<pybind11::object>(static_cast<PyObject*>(reference_))();
  return generator.is_none() || generator.attr("gi_frame").is_none();
}

void postpone_python_error() noexcept {
  try {
    throw;
  } catch (python_error& error) {
    pybind11::gil_scoped_acquire gil;
    error.restore();
    PyObject *type = nullptr, *value = nullptr, *trace = nullptr;
    PyErr_Fetch(&type, &value, &trace);
    PyErr_NormalizeException(&type, &value, &trace);
    Py_XDECREF(type);
    Py_XDECREF(trace);
    if (value && Py_AddPendingCall(raise_postponed, value) != 0) Py_DECREF(value);
  } catch (...) {
  }
}

}  // namespace syncengine
