#include "cuda/device/stream.h"

namespace syncengine::cuda {

namespace {

[[noreturn]] void refuse(const std::string& text) { throw Error(ErrorKind::InvalidUsage, "CUDA: " + text); }

std::string version_text(int version) {
  return std::to_string(version / 1000) + "." + std::to_string(version % 1000 / 10);
}

StreamBatchMemOp* find_stream_batch_mem_op() {
  int version = 0, count = 0;
  check(cudaDriverGetVersion(&version), "asking for the driver's version");
  if (version == 0)
    refuse("no driver; install NVIDIA's driver, and in a container pass the devices through (--gpus all)");
  cudaError_t status = cudaGetDeviceCount(&count);
  if (status == cudaErrorInsufficientDriver)
    refuse("the driver knows CUDA " + version_text(version) + ", this build needs " + version_text(CUDART_VERSION) +
           "; install a newer driver, or build with an older CUDA");
  if (status == cudaErrorNoDevice || (status == cudaSuccess && count == 0))
    refuse("the driver sees no device; look at CUDA_VISIBLE_DEVICES and nvidia-smi");
  check(status, "counting devices");
  void* address = nullptr;
  cudaDriverEntryPointQueryResult found{};
  // CUDA 11.7's version of this function needs no opt-in by a parameter of NVIDIA's kernel module.
  status = cudaGetDriverEntryPointByVersion("cuStreamBatchMemOp", &address, 11070, cudaEnableDefault, &found);
  if (status != cudaSuccess || found != cudaDriverEntryPointSuccess || address == nullptr)
    refuse("the driver has no cuStreamBatchMemOp; install a newer one");
  return reinterpret_cast<StreamBatchMemOp*>(address);
}

}  // namespace

StreamBatchMemOp* stream_batch_mem_op() {
  static StreamBatchMemOp* const found = find_stream_batch_mem_op();
  return found;
}

CUstreamBatchMemOpParams write_word(const uint32_t* word, uint32_t value) {
  CUstreamBatchMemOpParams params{};
  params.writeValue.operation = CU_STREAM_MEM_OP_WRITE_VALUE_32;
  params.writeValue.address = reinterpret_cast<CUdeviceptr>(word);
  params.writeValue.value = value;
  params.writeValue.flags = CU_STREAM_WRITE_VALUE_DEFAULT;
  return params;
}

CUstreamBatchMemOpParams wait_for_word(const uint32_t* word) {
  CUstreamBatchMemOpParams params{};
  params.waitValue.operation = CU_STREAM_MEM_OP_WAIT_VALUE_32;
  params.waitValue.address = reinterpret_cast<CUdeviceptr>(word);
  params.waitValue.value = kArrived;
  params.waitValue.flags = CU_STREAM_WAIT_VALUE_AND;
  return params;
}

void check(cudaError_t status, const char* what) {
  if (status == cudaSuccess) return;
  cudaGetLastError();  // clears the error, which a later call would report otherwise
  refuse(std::string(what) + ": " + cudaGetErrorName(status) + ", " + cudaGetErrorString(status));
}

}  // namespace syncengine::cuda
