// How C++ errors and Python's signals meet.
#pragma once

#include <pybind11/pybind11.h>

#include <functional>

#include "base/error.h"

namespace syncengine {

// The class in syncengine.errors of that name. Needs the GIL.
pybind11::object error_class(ErrorKind kind);

// The exception object of that class. Needs the GIL.
pybind11::object to_python(const Error& error);

// Makes `error` the pending Python exception. Needs the GIL.
void set_python_error(const Error& error);

// For Communicator::wait: runs Python's signal handlers, which may throw (KeyboardInterrupt). Called without the GIL.
std::function<void()> check_signals();

}  // namespace syncengine
