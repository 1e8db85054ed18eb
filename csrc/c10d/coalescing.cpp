#include <frameobject.h>
#include <pybind11/pybind11.h>

#include <utility>

#include "c10d/backend.h"
#include "c10d/call.h"

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

// A weak reference to the generator that calls startCoalescing(), which is torch's _coalescing_manager; null if
// something else calls. By it, has_ended() notices that the manager's block has raised: torch does not tell a backend.
std::shared_ptr<void> body_of_caller() {
  if (!Py_IsInitialized()) return nullptr;
  pybind11::gil_scoped_acquire gil;
  PyFrameObject* frame = PyEval_GetFrame();
  auto generator = pybind11::reinterpret_steal<pybind11::object>(frame ? generator_of(frame) : nullptr);
  if (!generator) return nullptr;
  return {pybind11::weakref(generator).release().ptr(), [](PyObject* reference) {
            if (!Py_IsInitialized()) return;
            pybind11::gil_scoped_acquire gil;
            Py_DECREF(reference);
          }};
}

bool has_ended(const std::shared_ptr<void>& body) {
  pybind11::gil_scoped_acquire gil;
  const auto generator = pybind11::reinterpret_borrow<pybind11::object>(static_cast<PyObject*>(body.get()))();
  return generator.is_none() || generator.attr("gi_frame").is_none();
}

}  // namespace

// TorchBackend's coalescing: the calls between startCoalescing() and endCoalescing() become one work. If an error
// prevents endCoalescing(), the calls take place all the same, like calls whose works were dropped.

void TorchBackend::startCoalescing() {
  auto coalesced = std::make_unique<Coalesced>();
  coalesced->body = body_of_caller();
  coalescing_.give(std::move(coalesced));
}

TorchWorkPtr TorchBackend::endCoalescing() {
  auto coalesced = coalescing_.take();
  if (!coalesced) throw Error(ErrorKind::InvalidUsage, "no coalescing has begun, or an error has ended it");
  TorchWork::CallOrigin origin{communicator_, messages_, OpType::COALESCED, at_most(::c10d::kUnsetTimeout)};
  Call call = std::move(coalesced->call);
  call.number = sequence_.load(std::memory_order_relaxed);
  if (!call.device().is_cpu()) {
    const c10::Stream stream = queue_on_device(communicator_, call, /*aside=*/true);
    return finish_on_device(std::move(origin), std::move(call), stream);
  }
  return c10::make_intrusive<TorchWork>(std::move(origin), std::move(call), std::move(coalesced->works));
}

// Takes this thread's coalesced calls; drops them if their block has raised, which torch does not report.
std::unique_ptr<Coalesced> TorchBackend::take_coalesced() {
  auto coalesced = coalescing_.take();
  if (coalesced && coalesced->body && has_ended(coalesced->body)) coalesced.reset();
  return coalesced;
}

}  // namespace syncengine
