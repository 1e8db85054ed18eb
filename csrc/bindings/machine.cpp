// What this process may use of its machine, as the engine sees it: for `syncengine doctor`.
#include <pybind11/stl.h>

#include "base/descriptors.h"
#include "base/memory.h"
#include "base/resources.h"
#include "bindings/bindings.h"
#include "bootstrap/host.h"
#include "kernels/reduce.h"
#include "transport/tcp/address.h"

namespace py = pybind11;

namespace syncengine {

namespace {

py::dict machine() {
  py::dict result;
  result["available_cores"] = available_cores();
  result["available_memory"] = available_memory();
  result["total_memory"] = total_memory();
  result["open_descriptors"] = open_descriptors();
  result["most_descriptors"] = most_descriptors();
  result["best_instruction_set"] = kernels::name(kernels::best_isa());
  return result;
}

std::vector<std::pair<std::string, std::string>> network_interfaces() {
  std::vector<std::pair<std::string, std::string>> result;
  for (const auto& [name, ip] : tcp::local_interfaces()) result.emplace_back(name, ip.text());
  return result;
}

void probe_shared_memory(size_t bytes) {
  const UniqueFd memory = create_sealed_memfd("syncengine-probe", bytes);
  const Mapping mapping(memory.get(), bytes);
}

}  // namespace

void bind_machine(py::module_& module) {
  module.def("machine", &machine);
  module.def("network_interfaces", &network_interfaces);
  module.def("host_key", &host_key, py::arg("host_id"));
  module.def("probe_shared_memory", &probe_shared_memory, py::arg("bytes"));
}

}  // namespace syncengine
