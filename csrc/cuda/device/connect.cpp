#include "cuda/device/connect.h"

#include "cuda/device/driver.h"
#include "cuda/device/group.h"
#include "cuda/device/relay_group.h"

namespace syncengine::cuda {

bool is_built() { return true; }

void require_device(int device) {
  driver();
  int count = 0;
  check(cudaGetDeviceCount(&count), "counting devices");
  if (device < 0 || device >= count)
    throw Error(ErrorKind::InvalidUsage,
                "CUDA: there is no device " + std::to_string(device) + ", only " + std::to_string(count));
}

std::shared_ptr<DeviceGroup> connect(std::shared_ptr<Communicator> communicator, int device,
                                     const std::function<void()>& interrupted) {
  require_device(device);
  if (communicator->spans_hosts()) return std::make_shared<RelayGroup>(std::move(communicator), device, interrupted);
  if (communicator->size() > kMaxRanks)
    throw Error(ErrorKind::InvalidUsage, "CUDA: at most " + std::to_string(kMaxRanks) +
                                             " ranks a communicator on one host, not " +
                                             std::to_string(communicator->size()));
  return std::make_shared<RealDeviceGroup>(std::move(communicator), device, interrupted);
}

bool is_capturing(void* stream) {
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  check(cudaStreamIsCapturing(static_cast<cudaStream_t>(stream), &status), "asking whether a stream is captured");
  return status != cudaStreamCaptureStatusNone;
}

void require_possible(const Operation& operation) {
  require_supported(operation);
  if (operation.flag_words > 0) throw Error(ErrorKind::InvalidUsage, "operations on devices carry no flags");
}

std::string describe(const Operation& operation) {
  if (operation.describe) return operation.describe();
  std::string text = name(operation.collective);
  if (operation.collective == Collective::Barrier) return text + "()";
  text += std::string("(") + name(operation.dtype) + ", " + std::to_string(operation.input.bytes()) + " bytes";
  if (operation.collective == Collective::AllReduce || operation.collective == Collective::ReduceScatter)
    text += std::string(", ") + name(operation.op);
  if (operation.collective == Collective::Broadcast) text += ", src=" + std::to_string(operation.root);
  return text + ") on CUDA tensors";
}

}  // namespace syncengine::cuda
