// Errors and signals of Python. A foreign C++ exception that crosses autograd becomes a plain RuntimeError; torch's
// python_error passes unchanged.
//
// Thread-safety: any thread. Functions that do not say that they need the GIL take it themselves, so the caller must
// hold no lock for which a holder of the GIL may wait.
#pragma once

#include <ATen/core/ivalue.h>
#include <pybind11/pybind11.h>

#include <functional>
#include <string>

#include "base/error.h"
#include "engine/communicator/communicator.h"

namespace syncengine {

using TorchFuture = c10::intrusive_ptr<c10::ivalue::Future>;

// The exception object, of the error's class in syncengine.errors. Needs the GIL.
pybind11::object to_python(const Error& error);

// Makes `error` the pending Python exception. Needs the GIL.
void set_python_error(const Error& error);

// Throws the pending Python exception as torch's python_error, which crosses autograd unchanged. Needs the GIL.
[[noreturn]] void throw_pending_python_error();

// Throws `error` in a hook or callback, as a Python exception of its class in syncengine.errors.
[[noreturn]] void throw_for_autograd(const Error& error);
// Rethrows, in a hook or callback, the exception that the current catch block handles: an Error as throw_for_autograd()
// throws it, anything else as it is.
[[noreturn]] void rethrow_for_autograd();

// The text "ValueError: ..." of an exception, by syncengine.errors.error_text, which never raises. Needs the GIL.
std::string error_text(pybind11::handle error);

// Issues Python's RuntimeWarning. Throws an exception if a filter of the program turns it into one.
void warn(const std::string& text);

// Runs Python's pending signal handlers; throws what they raise (KeyboardInterrupt), also as an Interruption.
void raise_pending_signal();

// Returns when the future is completed, and rethrows its error; if its value is on a device, current streams wait.
// Called without the GIL. Throws the communicator's error if that comes first, Error(Timeout) naming `what` past the
// communicator's timeout, and whatever a signal handler throws.
void wait_for_future(const TorchFuture& future, Communicator& communicator, const std::function<std::string()>& what);

}  // namespace syncengine
