// Replaces cuda/device/ in a build that had no nvcc, or no torch with CUDA.
#include "cuda/device_group.h"

namespace syncengine::cuda {

namespace {

[[noreturn]] void refuse() {
  throw Error(
      ErrorKind::InvalidUsage,
      "this build of syncengine has no CUDA side: install a torch with CUDA and nvcc of the same major version, then "
      "build again in a checkout (pip install --no-build-isolation --force-reinstall --no-deps .)");
}

}  // namespace

bool is_built() { return false; }

void require_device(int) { refuse(); }

bool is_capturing(void*) { refuse(); }

std::shared_ptr<DeviceGroup> connect(std::shared_ptr<Communicator>, int, const std::function<void()>&) { refuse(); }

}  // namespace syncengine::cuda
