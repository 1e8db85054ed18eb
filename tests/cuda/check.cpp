// The whole CUDA core without torch. Without a driver it must say so by name; with a device, ranks as threads on device 0 reduce,
// and their bits are those of the CPU's kernels.
//
//   cuda_check             all of that
//   cuda_check no-driver   fails unless the driver is missing
#include <cuda_runtime_api.h>

#include <cstdio>
#include <cstring>
#include <string>
#include <vector>

#include "cuda/device/driver.h"
#include "cuda/device_group.h"
#include "job.h"
#include "kernels/reduce.h"

namespace syncengine {

namespace {

using testing::run_job;

Operation on_device(Collective collective, DType dtype, ReduceOp op, void* data, size_t bytes) {
  Operation operation = testing::all_reduce_of(data, bytes, dtype, op);
  operation.collective = collective;
  return operation;
}

std::vector<uint32_t> values(int rank, size_t count) {
  std::vector<uint32_t> words(count);
  for (size_t i = 0; i < count; ++i) words[i] = static_cast<uint32_t>((i + 1) * 2654435761u * (rank + 3));
  return words;
}

// NaN has many bits: compare those as NaN.
bool same(DType dtype, const std::vector<uint32_t>& a, const std::vector<uint32_t>& b) {
  for (size_t i = 0; i < a.size(); ++i) {
    if (a[i] == b[i]) continue;
    if (dtype == DType::Float32 && (a[i] & 0x7fffffff) > 0x7f800000 && (b[i] & 0x7fffffff) > 0x7f800000) continue;
    return false;
  }
  return true;
}

void reduce_on_threads(int world, size_t count, bool direct, DType dtype, ReduceOp op) {
  const size_t bytes = count * 4;
  std::vector<uint32_t> expected(count);
  std::vector<std::vector<uint32_t>> inputs;
  std::vector<const void*> sources;
  for (int rank = 0; rank < world; ++rank) inputs.push_back(values(rank, count));
  for (auto& input : inputs) sources.push_back(input.data());
  void* destination = expected.data();
  kernels::reduce({dtype, op}, sources.data(), world, &destination, 1, count);

  Options options;
  options.timeout = seconds(30);
  run_job(world, options, [&](int rank, Communicator& communicator) {
    auto group = cuda::connect(communicator.shared_from_this(), 0, {});
    cuda::check(cudaSetDevice(0), "choosing a device");
    std::shared_ptr<void> memory;
    if (direct) {
      memory = group->allocate(bytes, {});
    } else {
      void* plain = nullptr;
      cuda::check(cudaMalloc(&plain, bytes), "taking memory");
      memory = {plain, [](void* data) { cudaFree(data); }};
    }
    cudaStream_t stream = nullptr;
    cuda::check(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "making a stream");
    std::vector<uint32_t> result(count);
    for (int round = 0; round < 3; ++round) {
      cuda::check(cudaMemcpyAsync(memory.get(), inputs[rank].data(), bytes, cudaMemcpyHostToDevice, stream),
                  "copying in");
      group->run(on_device(Collective::AllReduce, dtype, op, memory.get(), bytes), stream);
      cuda::check(cudaMemcpyAsync(result.data(), memory.get(), bytes, cudaMemcpyDeviceToHost, stream), "copying out");
      cuda::check(cudaStreamSynchronize(stream), "waiting for a collective");
      CHECK(same(dtype, result, expected));
    }
    cudaStreamDestroy(stream);
    group->close();
  });
}

void reduce_in_all_ways() {
  for (int world : {1, 2, 4, 8})
    for (size_t count : {1, 1000, 100'003, 20'000'000})
      for (bool direct : {false, true}) {
        if (world == 1) continue;
        reduce_on_threads(world, count, direct, DType::Float32, ReduceOp::Sum);
        if (count < 1'000'000) {
          reduce_on_threads(world, count, direct, DType::Float16, ReduceOp::Max);
          reduce_on_threads(world, count, direct, DType::Int32, ReduceOp::Product);
        }
        std::printf("%d ranks, %zu words, %s: the CPU's bits\n", world, count, direct ? "direct" : "staged");
      }
}

int run(bool no_driver_expected) {
  try {
    cuda::require_device(0);
  } catch (const Error& error) {
    const std::string text = error.what();
    std::printf("%s: %s\n", name(error.kind()), text.c_str());
    const bool no_driver = error.kind() == ErrorKind::InvalidUsage && testing::contains(text, "CUDA: no driver");
    return no_driver ? 0 : 1;
  }
  if (no_driver_expected) return std::printf("there is a driver\n"), 1;
  reduce_in_all_ways();
  return 0;
}

}  // namespace

}  // namespace syncengine

int main(int argc, char** argv) {
  try {
    return syncengine::run(argc > 1 && std::strcmp(argv[1], "no-driver") == 0);
  } catch (const std::exception& error) {
    return std::printf("FAILED: %s\n", error.what()), 1;
  }
}
