#include "bindings/python_hook.h"

#include <torch/csrc/jit/python/pybind_utils.h>

#include <stdexcept>
#include <string>

namespace syncengine {

namespace py = pybind11;

namespace {

std::string type_name(const py::handle& object) {
  return py::str(py::type::handle_of(object).attr("__name__")).cast<std::string>();
}

}  // namespace

PythonHook::~PythonHook() {
  py::gil_scoped_acquire gil;
  state_ = {};
  hook_ = {};
}

c10::intrusive_ptr<c10::ivalue::Future> PythonHook::runHook(c10d::GradBucket& bucket) {
  py::gil_scoped_acquire gil;
  py::object result = hook_(state_, bucket);
  if (!py::isinstance<torch::jit::PythonFutureWrapper>(result)) {
    throw std::runtime_error("a communication hook's callback must return a torch.futures.Future object, not " +
                             type_name(result));
  }
  return result.cast<std::shared_ptr<torch::jit::PythonFutureWrapper>>()->fut;
}

at::Tensor PythonHook::parseHookResult(const c10::IValue& result) {
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

}  // namespace syncengine
