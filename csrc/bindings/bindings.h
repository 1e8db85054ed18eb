// The extension's parts, one function each; module.cpp calls them in order. Translation only: no logic.
#pragma once

#include <pybind11/pybind11.h>

#include <memory>
#include <string>
#include <vector>

#include "base/texts.h"
#include "transport/interhost.h"
#include "transport/packets/packets.h"

namespace syncengine {

void bind_communicator(pybind11::module_& module);
void bind_packet_transports(pybind11::module_& module);
void bind_local_bootstrap(pybind11::module_& module);
void bind_common_memory(pybind11::module_& module);
void bind_reducer(pybind11::module_& module);
void bind_backend(pybind11::module_& module);

// A transport of packets between hosts, made by Python for connect(). That call takes the transport out of the handle.
struct PacketTransportHandle {
  std::unique_ptr<packets::PacketTransport> transport;
  packets::Options options;
};
// Makes an endpoint over the transport in `handle`; end_packet_transports() ends it. `peers`: see packets::Endpoint.
std::unique_ptr<Interhost> connect_by(PacketTransportHandle& handle, int rank, const std::vector<int>& peers,
                                      RankNames names);

// A text from Python on its way to errors and peers, such as a parameter's name. Characters that UTF-8 does not have,
// such as the lone surrogates of some file names, are written with backslashes, so that every text can be shown.
struct Text : std::string {};

}  // namespace syncengine

template <>
struct pybind11::detail::type_caster<syncengine::Text> {
  PYBIND11_TYPE_CASTER(syncengine::Text, const_name("str"));

  bool load(handle source, bool) {
    if (!PyUnicode_Check(source.ptr())) return false;
    auto bytes = reinterpret_steal<object>(PyUnicode_AsEncodedString(source.ptr(), "utf-8", "backslashreplace"));
    if (!bytes) throw error_already_set();
    value.assign(PyBytes_AS_STRING(bytes.ptr()), static_cast<size_t>(PyBytes_GET_SIZE(bytes.ptr())));
    return true;
  }
};
