// The extension's parts, one function each; module.cpp calls them in order. Translation only: no logic.
#pragma once

#include <pybind11/pybind11.h>

#include <functional>

namespace syncengine {

void bind_errors(pybind11::module_& module);
void bind_communicator(pybind11::module_& module);
void bind_packet_transports(pybind11::module_& module);
void bind_local_bootstrap(pybind11::module_& module);
void bind_common_memory(pybind11::module_& module);
void bind_weights(pybind11::module_& module);
void bind_reducer(pybind11::module_& module);
void bind_backend(pybind11::module_& module);
void bind_machine(pybind11::module_& module);
void bind_recorder(pybind11::module_& module);

// C++ errors as Python's, and Python's signals in C++ waits.

// For Communicator::wait: runs Python's signal handlers, which may throw (KeyboardInterrupt). Called without the GIL.
std::function<void()> check_signals();

// Which threads could make calls.

// Threads of this process that Python knows, without some that can't: any of them might make a call. kUnknownCallers on
// a thread that Python does not know.
int count_python_threads();

}  // namespace syncengine
