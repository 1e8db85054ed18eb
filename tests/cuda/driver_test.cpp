// Without a driver, or a device, the CUDA side must say so by name; a program that has it links and starts all the
// same.
#include <cuda_runtime_api.h>

#include "cuda/device_group.h"
#include "test.h"

namespace syncengine {

TEST(gpu_driver_that_is_missing_is_named) {
  int version = 0, devices = 0;
  const bool has_driver = cudaDriverGetVersion(&version) == cudaSuccess && version > 0;
  if (has_driver && cudaGetDeviceCount(&devices) == cudaSuccess && devices > 0) return cuda::require_device(0);
  const std::string text = CHECK_THROWS(cuda::require_device(0), ErrorKind::InvalidUsage);
  CHECK(testing::contains(text, has_driver ? "CUDA: the driver " : "CUDA: no driver; install NVIDIA's driver"));
}

}  // namespace syncengine
