#include "bindings/bindings.h"

#include "base/build_id.h"
#include "base/sync_point.h"
#include "cuda/device_group.h"
#include "kernels/reduce.h"

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
  module.def(
      "instruction_set", [] { return syncengine::kernels::name(syncengine::kernels::active_isa()); },
      "The instruction set of the reduction kernels: 'scalar', 'avx2' or 'avx512' (SYNCENGINE_ISA chooses).");
  module.attr("build_id") = syncengine::build_text(syncengine::build_id());
  module.attr("has_cuda") = syncengine::cuda::is_built();
  module.attr("has_test_hooks") = syncengine::has_test_hooks();
}
