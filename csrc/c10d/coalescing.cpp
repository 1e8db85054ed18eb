#include <frameobject.h>
#include <pybind11/pybind11.h>
#include <torch/csrc/Exceptions.h>

#include <utility>

#include "c10d/backend.h"
#include "c10d/call.h"
#include "c10d/in_flight.h"
#include "reducer/torch/python_error.h"

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

// TorchBackend's coalescing: how the calls between startCoalescing() and endCoalescing() become one work, and what
// becomes of those that no end follows.

// One that was left open by an error ends here at the latest.
void TorchBackend::startCoalescing() {
  auto coalesced = std::make_unique<Coalesced>();
  coalesced->dropped = [this](Coalesced& calls) { leave(calls); };
  coalesced->body = CoalescingBody::of_caller([this] { end_left_coalescing(); });
  coalescing_.give(std::move(coalesced));
}

TorchBackend::TorchWorkPtr TorchBackend::endCoalescing() {
  auto coalesced = coalescing_.take();
  if (!coalesced) throw Error(ErrorKind::InvalidUsage, "no coalescing has begun, or an error has ended it");
  coalesced->dropped = {};
  TorchWork::Origin origin{communicator_, messages_, ::c10d::OpType::COALESCED,
                           sequence_.load(std::memory_order_relaxed), at_most(::c10d::kUnsetTimeout)};
  Call call = std::move(coalesced->call);
  if (!call.device().is_cpu()) {
    const c10::Stream stream = queue_on_device(communicator_, call, /*aside=*/true);
    return finish_on_device(std::move(origin), std::move(call), stream);
  }
  return c10::make_intrusive<TorchWork>(std::move(origin), std::move(call), std::move(coalesced->works));
}

// This thread's. A body that has raised is over: torch tells of no end.
std::unique_ptr<Coalesced> TorchBackend::take_coalesced() {
  auto coalesced = coalescing_.take();
  if (coalesced && coalesced->body && coalesced->body->has_ended()) coalesced.reset();
  return coalesced;
}

void TorchBackend::end_left_coalescing() {
  if (auto coalesced = take_coalesced()) coalescing_.give(std::move(coalesced));
}

// As if each collective had waited, as with Gloo. Not messages: what they wait for may be what was to come.
void TorchBackend::leave(Coalesced& coalesced) noexcept {
  try {
    for (const auto& each : coalesced.collectives)
      communicator_->wait(each, raise_pending_signal, at_most(::c10d::kUnsetTimeout));
    InFlight::of_process().deliver_ended();
  } catch (...) {  // the group has failed
    postpone_python_error();
  }
}

}  // namespace syncengine
