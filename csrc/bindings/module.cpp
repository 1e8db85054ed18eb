#include <torch/csrc/Exceptions.h>

#include "base/build_id.h"
#include "base/error.h"
#include "base/sync_point.h"
#include "bindings/bindings.h"
#include "cuda/device_group.h"
#include "kernels/reduce.h"
#include "reducer/torch/python_error.h"

namespace py = pybind11;

namespace syncengine {

void bind_errors(py::module_&) {
  py::register_exception_translator([](std::exception_ptr pointer) {
    try {
      if (pointer) std::rethrow_exception(pointer);
    } catch (const Error& error) {
      set_python_error(error);
    } catch (python_error& error) {  // Ctrl-C, say
      error.restore();
    }
  });
}

}  // namespace syncengine

PYBIND11_MODULE(TORCH_EXTENSION_NAME, module) {
  module.doc() = "syncengine's engine: collectives, communicators and the gradient reducer.";
  syncengine::bind_errors(module);
  syncengine::bind_communicator(module);
  syncengine::bind_packet_transports(module);
  syncengine::bind_local_bootstrap(module);
  syncengine::bind_common_memory(module);
  syncengine::bind_weights(module);
  syncengine::bind_reducer(module);
  syncengine::bind_backend(module);
  syncengine::bind_machine(module);
  syncengine::bind_recorder(module);
  module.def(
      "instruction_set", [] { return syncengine::kernels::name(syncengine::kernels::active_isa()); },
      "The instruction set of the reduction kernels: 'scalar', 'avx2' or 'avx512' (SYNCENGINE_ISA chooses).");
  module.attr("build_id") = syncengine::build_text(syncengine::build_id());
  module.attr("has_cuda") = syncengine::cuda::is_built();
  module.attr("has_test_hooks") = syncengine::has_test_hooks();
}
