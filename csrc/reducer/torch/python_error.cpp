#include "reducer/torch/python_error.h"

#include <torch/csrc/Exceptions.h>

#include <chrono>
#include <future>
#include <memory>
#include <string_view>
#include <utility>

namespace syncengine {

void throw_pending_python_error() {
  python_error error;
  error.persist();
  throw error;
}

namespace {

// The text of an exception that a signal handler has raised.
std::string interruption_text(pybind11::handle type, pybind11::handle value) {
  if (PyErr_GivenExceptionMatches(type.ptr(), PyExc_KeyboardInterrupt)) return "";
  return value ? error_text(value) : reinterpret_cast<PyTypeObject*>(type.ptr())->tp_name;
}

struct RaisedInWait final : python_error, Interruption {
  explicit RaisedInWait(python_error error)
      : python_error(std::move(error)), Interruption(interruption_text(type, value)) {}
};

}  // namespace

std::string error_text(pybind11::handle error) {
  return pybind11::module_::import("syncengine.errors").attr("error_text")(error).cast<std::string>();
}

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

void throw_for_autograd(const Error& error) {
  pybind11::gil_scoped_acquire gil;
  set_python_error(error);
  throw_pending_python_error();
}

void rethrow_for_autograd() {
  try {
    throw;
  } catch (const Error& error) {
    throw_for_autograd(error);
  }
}

void warn(const std::string& text) {
  pybind11::gil_scoped_acquire gil;
  if (PyErr_WarnEx(PyExc_RuntimeWarning, text.c_str(), 1) < 0) throw_pending_python_error();
}

void raise_pending_signal() {
  pybind11::gil_scoped_acquire gil;
  if (PyErr_CheckSignals() == 0) return;
  python_error error;
  error.persist();
  throw RaisedInWait(std::move(error));
}

void wait_for_future(const TorchFuture& future, Communicator& communicator, const std::function<std::string()>& what) {
  constexpr auto kTick = std::chrono::milliseconds(50);
  auto deadline = Deadline::after(communicator.timeout());
  if (!future->completed()) {
    const auto completion = std::make_shared<std::promise<void>>();  // outlives the wait if the future comes late
    const std::future<void> completed = completion->get_future();
    future->addCallback([completion](c10::ivalue::Future&) { completion->set_value(); }, /*uses_future=*/false);
    while (completed.wait_for(kTick) != std::future_status::ready) {
      raise_pending_signal();
      communicator.check_peers();
      if (deadline.passed()) throw Error(ErrorKind::Timeout, what() + " has not ended within the timeout");
    }
  }
  if (future->hasError()) std::rethrow_exception(future->exception_ptr());
  future->wait();  // makes the current streams wait; the host has waited
}

}  // namespace syncengine
