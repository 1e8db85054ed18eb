// The driver's function that is looked up by name: memory operations of streams.
#include <atomic>
#include <chrono>
#include <cstring>
#include <thread>

#include "machine.h"

namespace software {

namespace {

// The word at a device address that `device` can use; null if there is none.
uint32_t* word_at(CUdeviceptr address, int device) {
  const auto range = find(reinterpret_cast<void*>(address));
  if (!range || range->kind == Kind::Gone || range->kind == Kind::PinnedHost || address % 4 != 0) return nullptr;
  if (range->kind == Kind::PinnedDevice && !range->portable && range->device != device) return nullptr;
  if (range->kind == Kind::Device && !reaches(device, range->device)) return nullptr;
  return reinterpret_cast<uint32_t*>(address);
}

bool is_met(uint32_t now, uint32_t value, unsigned how) {
  switch (how) {
    case CU_STREAM_WAIT_VALUE_GEQ: return static_cast<int32_t>(now - value) >= 0;
    case CU_STREAM_WAIT_VALUE_EQ: return now == value;
    case CU_STREAM_WAIT_VALUE_AND: return (now & value) != 0;
    default: return ~(now | value) != 0;  // NOR
  }
}

void run(const CUstreamBatchMemOpParams& params, int device) {
  uint32_t* word = word_at(params.waitValue.address, device);
  if (!word) undefined("a stream's memory operation on memory that was given back");
  if (params.operation == CU_STREAM_MEM_OP_WRITE_VALUE_32) {
    const bool bare = params.writeValue.flags == CU_STREAM_WRITE_VALUE_NO_MEMORY_BARRIER;
    __atomic_store_n(word, params.writeValue.value, bare ? __ATOMIC_RELAXED : __ATOMIC_RELEASE);
    return;
  }
  for (int looks = 0; !is_met(__atomic_load_n(word, __ATOMIC_ACQUIRE), params.waitValue.value, params.waitValue.flags);
       ++looks)
    if (looks < 100)
      std::this_thread::yield();
    else
      std::this_thread::sleep_for(std::chrono::microseconds(50));
}

CUresult verdict(const CUstreamBatchMemOpParams& params, int device) {
  switch (params.operation) {
    case CU_STREAM_MEM_OP_WRITE_VALUE_32:
      if (params.writeValue.flags & ~CU_STREAM_WRITE_VALUE_NO_MEMORY_BARRIER) return CUDA_ERROR_INVALID_VALUE;
      break;
    case CU_STREAM_MEM_OP_WAIT_VALUE_32:
      if (params.waitValue.flags & CU_STREAM_WAIT_VALUE_FLUSH) return CUDA_ERROR_NOT_SUPPORTED;
      if (params.waitValue.flags > CU_STREAM_WAIT_VALUE_NOR) return CUDA_ERROR_INVALID_VALUE;
      break;
    default: return CUDA_ERROR_NOT_SUPPORTED;
  }
  return word_at(params.waitValue.address, device) ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

CUresult stream_batch_mem_op(CUstream handle, unsigned count, CUstreamBatchMemOpParams* list, unsigned flags) {
  const auto stream = stream_of(handle);
  if (!stream || device_of(*stream) != current_device()) return CUDA_ERROR_INVALID_HANDLE;
  if (count == 0 || count >= 256 || flags != 0) return CUDA_ERROR_INVALID_VALUE;
  const int device = current_device();
  for (unsigned i = 0; i < count; ++i)
    if (CUresult wrong = verdict(list[i], device); wrong != CUDA_SUCCESS) return wrong;
  enqueue(stream, [operations = std::vector<CUstreamBatchMemOpParams>(list, list + count), device] {
    for (const auto& operation : operations) run(operation, device);
  });
  return CUDA_SUCCESS;
}

}  // namespace

}  // namespace software

cudaError_t cudaGetDriverEntryPointByVersion(const char* symbol, void** address, unsigned version,
                                             unsigned long long flags, cudaDriverEntryPointQueryResult* result) {
  if (flags > cudaEnablePerThreadDefaultStream) return software::fail(cudaErrorInvalidValue);
  *address = nullptr;
  *result = cudaDriverEntryPointSymbolNotFound;
  if (std::strcmp(symbol, "cuStreamBatchMemOp") != 0) return cudaSuccess;
  *result = cudaDriverEntryPointVersionNotSufficent;  // earlier versions have another function of this name
  if (version < 11070 || version > CUDA_VERSION) return cudaSuccess;
  *result = cudaDriverEntryPointSuccess;
  *address = reinterpret_cast<void*>(software::stream_batch_mem_op);
  return cudaSuccess;
}
