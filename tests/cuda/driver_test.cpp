// Without a driver the CUDA side must say so by name; a program that has it links and starts all the same.
#include <cuda_runtime_api.h>

#include "cuda/device_group.h"
#include "test.h"

namespace syncengine {

TEST(gpu_driver_that_is_missing_is_named) {
  int version = 0;
  if (cudaDriverGetVersion(&version) == cudaSuccess && version > 0) return;
  const std::string text = CHECK_THROWS(cuda::require_device(0), ErrorKind::InvalidUsage);
  CHECK(testing::contains(text, "CUDA: no driver; install NVIDIA's driver"));
}

}  // namespace syncengine
