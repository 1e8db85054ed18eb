// Errors on their way to Python, also from autograd's threads.
//
// A foreign C++ exception that crosses autograd becomes a plain RuntimeError; torch's python_error passes unchanged.
// Thread-safety: any thread. Where nothing else is said the GIL is taken inside, so it must not be waited for by a
// holder of the caller's locks.
#pragma once

#include <pybind11/pybind11.h>

#include <string>

#include "base/error.h"

namespace syncengine {

// The exception object, of the class of that name in syncengine.errors. Needs the GIL.
pybind11::object to_python(const Error& error);

// Makes `error` the pending Python exception. Needs the GIL.
void set_python_error(const Error& error);

// The pending Python exception, as torch's, which crosses autograd unchanged. Needs the GIL.
[[noreturn]] void throw_pending_python_error();

// In a hook or callback: throws the class of that name in syncengine.errors.
[[noreturn]] void throw_for_autograd(const Error& error);
// In a catch block there: the same of an Error; anything else is rethrown as it is.
[[noreturn]] void rethrow_for_autograd();

// "ValueError: ...", by syncengine.errors.error_text, which fails for no exception. Needs the GIL.
std::string error_text(pybind11::handle error);

// Python's RuntimeWarning. Throws what a filter of the program makes of it.
void warn(const std::string& text);

// Runs Python's pending signal handlers; throws what they raise (KeyboardInterrupt), also as an Interruption.
void raise_pending_signal();

}  // namespace syncengine
