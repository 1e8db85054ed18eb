// What the software device refuses, as a driver does; and what the CUDA side makes of drivers that are missing or old.
#include <cstdlib>

#include "cuda/device/memory.h"
#include "machine.h"
#include "ranks.h"

namespace syncengine {

namespace {

CUstreamBatchMemOpParams write_to(const void* address) {
  CUstreamBatchMemOpParams params{};
  params.writeValue.operation = CU_STREAM_MEM_OP_WRITE_VALUE_32;
  params.writeValue.address = reinterpret_cast<CUdeviceptr>(address);
  return params;
}

CUresult queue(cudaStream_t stream, CUstreamBatchMemOpParams params) {
  return cuda::stream_batch_mem_op()(stream, 1, &params, 0);
}

}  // namespace

TEST(software_device_refuses_memory_operations_as_a_driver_does) {
  cudaStream_t stream = nullptr;
  cuda::check(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "making a stream");
  void* page = nullptr;
  std::byte* words = nullptr;
  {
    const cuda::PinnedMemory pinned(4096);
    page = pinned.data();
    words = pinned.on_device();
    CHECK_EQ(queue(stream, write_to(words + 8)), CUDA_SUCCESS);
    CHECK_EQ(queue(stream, write_to(words + 2)), CUDA_ERROR_INVALID_VALUE);  // unaligned
    CHECK_EQ(queue(stream, write_to(page)), CUDA_ERROR_INVALID_VALUE);       // the host's address
    auto wait = write_to(words + 8);
    wait.waitValue.operation = CU_STREAM_MEM_OP_WAIT_VALUE_32;
    wait.waitValue.flags = CU_STREAM_WAIT_VALUE_NOR + 1;
    CHECK_EQ(queue(stream, wait), CUDA_ERROR_INVALID_VALUE);
    wait.waitValue.flags = CU_STREAM_WAIT_VALUE_AND | CU_STREAM_WAIT_VALUE_FLUSH;
    CHECK_EQ(queue(stream, wait), CUDA_ERROR_NOT_SUPPORTED);
    auto write = write_to(words + 8);
    write.writeValue.flags = 2;
    CHECK_EQ(queue(stream, write), CUDA_ERROR_INVALID_VALUE);
    CHECK_EQ(cuda::stream_batch_mem_op()(stream, 0, &write, 0), CUDA_ERROR_INVALID_VALUE);
    CHECK_EQ(cuda::stream_batch_mem_op()(stream, 256, &write, 0), CUDA_ERROR_INVALID_VALUE);
    CHECK_EQ(cudaHostRegister(page, 4096, cudaHostRegisterMapped), cudaErrorHostMemoryAlreadyRegistered);
    CHECK_EQ(cudaStreamSynchronize(stream), cudaSuccess);
  }
  CHECK_EQ(queue(stream, write_to(words + 8)), CUDA_ERROR_INVALID_VALUE);  // given back
  CHECK_EQ(cudaHostUnregister(page), cudaErrorHostMemoryNotRegistered);
  cudaStreamDestroy(stream);
  CHECK_EQ(queue(stream, write_to(words + 8)), CUDA_ERROR_INVALID_HANDLE);
  CHECK_EQ(cudaStreamSynchronize(stream), cudaErrorInvalidResourceHandle);
  cudaGetLastError();
}

TEST(software_device_refuses_memory_as_a_driver_does) {
  void* memory = nullptr;
  cuda::check(cudaMalloc(&memory, 100), "taking memory");
  cudaIpcMemHandle_t handle;
  CHECK_EQ(cudaIpcGetMemHandle(&handle, static_cast<std::byte*>(memory) + 4), cudaErrorInvalidValue);
  CHECK_EQ(cudaIpcGetMemHandle(&handle, memory), cudaSuccess);
  void* opened = nullptr;
  CHECK_EQ(cudaIpcOpenMemHandle(&opened, handle, cudaIpcMemLazyEnablePeerAccess), cudaErrorDeviceUninitialized);
  char host[200] = {};
  CHECK_EQ(cudaMemcpy(memory, host, 101, cudaMemcpyHostToDevice), cudaErrorInvalidValue);
  CHECK_EQ(cudaMemcpy(host, memory, 100, cudaMemcpyDeviceToHost), cudaSuccess);
  CHECK(host[0] != 0 && host[99] != 0);  // new memory is not zero
  CHECK_EQ(cudaFree(static_cast<std::byte*>(memory) + 4), cudaErrorInvalidValue);
  CHECK_EQ(cudaFree(memory), cudaSuccess);
  CHECK_EQ(cudaFree(memory), cudaErrorInvalidValue);
  CHECK_EQ(cudaSetDevice(1), cudaErrorInvalidDevice);
  CHECK_EQ(cudaGetLastError(), cudaErrorInvalidDevice);
  CHECK_EQ(cudaGetLastError(), cudaSuccess);
}

TEST(software_device_spoils_captures_as_a_driver_does) {
  cudaStream_t stream = nullptr;
  cuda::check(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "making a stream");
  cuda::check(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal), "beginning a capture");
  void* memory = nullptr;
  CHECK_EQ(cudaMalloc(&memory, 100), cudaErrorStreamCaptureUnsupported);
  cudaGraph_t graph = nullptr;
  CHECK_EQ(cudaStreamEndCapture(stream, &graph), cudaErrorStreamCaptureInvalidated);
  cudaStreamDestroy(stream);
  cudaGetLastError();
}

// In processes of their own: a driver is looked for once.
TEST(gpu_drivers_that_are_missing_or_old_are_named) {
  testing::run_processes("gpu_drivers_that_are_missing_or_old_are_named", {0, 0}, {},
                         [](int, Communicator&, testing::Meeting&) {
                           auto error = [] { return CHECK_THROWS(cuda::require_device(0), ErrorKind::InvalidUsage); };
                           setenv("SOFTWARE_CUDA_DRIVER", "0", 1);
                           CHECK(testing::contains(error(), "no driver"));
                           setenv("SOFTWARE_CUDA_DRIVER", "11080", 1);
                           CHECK(testing::contains(error(), "the driver knows CUDA 11.8, this build needs"));
                           unsetenv("SOFTWARE_CUDA_DRIVER");
                           setenv("CUDA_VISIBLE_DEVICES", "", 1);
                           CHECK(testing::contains(error(), "the driver sees no device"));
                           setenv("CUDA_VISIBLE_DEVICES", "5,6", 1);
                           CHECK(testing::contains(CHECK_THROWS(cuda::require_device(2), ErrorKind::InvalidUsage),
                                                   "there is no device 2, only 2"));
                         });
}

}  // namespace syncengine
