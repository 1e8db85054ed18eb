// Steps on a CUDA stream: exchanges are memory operations of the stream, so that waiting holds no multiprocessor and
// needs no host.
//
// Ownership: none. Thread-safety: one thread at a time. Failure: InvalidUsage with CUDA's own words.
#pragma once

#include <vector>

#include "cuda/device/driver.h"
#include "cuda/sequence.h"

namespace syncengine::cuda {

// For benchmarks of one rank alone, in a build with test hooks: with SYNCENGINE_TEST_FAKE_ARRIVALS set a rank gives its
// peers' signals itself, and so never waits. What it reads of them is whatever lies there.
bool fakes_arrivals();

class StreamSteps : public Steps {
 public:
  // `controls` of each rank, as the device sees them.
  StreamSteps(int rank, const std::vector<Control*>& controls, int blocks, cudaStream_t stream)
      : rank_(rank), controls_(controls), blocks_(blocks), stream_(stream) {}

  void exchange(const Exchange& exchange) override;
  void reduce(const kernels::Reduction& reduction, const ReduceArgs& args) override;
  void copy(const CopyArgs& args) override;
  void one_shot(const kernels::Reduction& reduction, const OneShotArgs& args) override;

 private:
  void write(const uint32_t* word, uint32_t value);
  void wait(const uint32_t* word);
  void reset(int set);

  int rank_;
  const std::vector<Control*>& controls_;
  int blocks_;
  cudaStream_t stream_;
  std::vector<CUstreamBatchMemOpParams> operations_;
};

}  // namespace syncengine::cuda
