// The extension's parts, one function each; module.cpp calls them in order. Translation only: no logic.
#pragma once

#include <pybind11/pybind11.h>

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

}  // namespace syncengine
