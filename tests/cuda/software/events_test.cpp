// Events and captures of the software device: what is ordered, and what is refused, as CUDA's documentation says.
#include <atomic>
#include <chrono>
#include <thread>

#include "cuda/device/stream.h"
#include "machine.h"
#include "ranks.h"

namespace syncengine {

namespace {

struct Two {
  Two() {
    for (cudaStream_t* stream : {&first, &second})
      cuda::check(cudaStreamCreateWithFlags(stream, cudaStreamNonBlocking), "making a stream");
    cuda::check(cudaEventCreateWithFlags(&event, cudaEventDisableTiming), "making an event");
  }
  ~Two() {
    cudaStreamDestroy(first);
    cudaStreamDestroy(second);
    cudaEventDestroy(event);
  }
  cudaStream_t first = nullptr, second = nullptr;
  cudaEvent_t event = nullptr;
};

void queue(cudaStream_t stream, software::Step step) {
  software::enqueue(software::stream_of(stream), std::move(step));
}

}  // namespace

TEST(software_device_orders_streams_by_events) {
  Two two;
  CHECK_EQ(cudaEventQuery(two.event), cudaSuccess);  // never recorded
  std::atomic<bool> go = false;
  std::atomic<int> value = 0, seen = 0;
  queue(two.first, [&] {
    go.wait(false);
    value = 1;
  });
  CHECK_EQ(cudaEventRecord(two.event, two.first), cudaSuccess);
  CHECK_EQ(cudaEventQuery(two.event), cudaErrorNotReady);
  CHECK_EQ(cudaStreamWaitEvent(two.second, two.event, 0), cudaSuccess);
  queue(two.second, [&] { seen = value.load(); });
  CHECK_EQ(cudaStreamQuery(two.second), cudaErrorNotReady);
  go = true;
  go.notify_all();
  CHECK_EQ(cudaStreamSynchronize(two.second), cudaSuccess);
  CHECK_EQ(seen.load(), 1);
  CHECK_EQ(cudaEventQuery(two.event), cudaSuccess);
}

TEST(software_device_waits_for_destroyed_streams) {
  cudaStream_t stream = nullptr;
  CHECK_EQ(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), cudaSuccess);
  std::atomic<bool> done = false;
  queue(stream, [&] {
    std::this_thread::sleep_for(std::chrono::milliseconds(50));
    done = true;
  });
  CHECK_EQ(cudaStreamDestroy(stream), cudaSuccess);
  CHECK_EQ(cudaDeviceSynchronize(), cudaSuccess);
  CHECK(done.load());
}

TEST(software_device_captures_streams_that_wait_for_a_captured_one) {
  Two two;
  int steps = 0;
  cudaGraph_t graph = nullptr;
  auto capture = [&](bool joins) {
    CHECK_EQ(cudaStreamBeginCapture(two.first, cudaStreamCaptureModeThreadLocal), cudaSuccess);
    CHECK_EQ(cudaEventRecord(two.event, two.first), cudaSuccess);
    CHECK_EQ(cudaStreamWaitEvent(two.second, two.event, 0), cudaSuccess);
    queue(two.second, [&] { ++steps; });
    CHECK_EQ(cudaEventRecord(two.event, two.second), cudaSuccess);
    if (joins) CHECK_EQ(cudaStreamWaitEvent(two.first, two.event, 0), cudaSuccess);
    return cudaStreamEndCapture(two.first, &graph);
  };
  CHECK_EQ(capture(false), cudaErrorStreamCaptureUnjoined);
  CHECK_EQ(capture(true), cudaSuccess);
  CHECK_EQ(steps, 0);
  cudaGraphExec_t executable = nullptr;
  CHECK_EQ(cudaGraphInstantiate(&executable, graph, 0), cudaSuccess);
  for (int i = 0; i < 2; ++i) CHECK_EQ(cudaGraphLaunch(executable, two.second), cudaSuccess);
  CHECK_EQ(cudaStreamSynchronize(two.second), cudaSuccess);
  CHECK_EQ(steps, 2);
  cudaGraphExecDestroy(executable);
  cudaGraphDestroy(graph);
}

TEST(software_device_refuses_what_spoils_captures) {
  Two two;
  cudaGraph_t graph = nullptr;
  CHECK_EQ(cudaEventRecord(two.event, two.second), cudaSuccess);
  CHECK_EQ(cudaStreamBeginCapture(two.first, cudaStreamCaptureModeGlobal), cudaSuccess);
  CHECK_EQ(cudaStreamWaitEvent(two.first, two.event, 0), cudaErrorStreamCaptureIsolation);
  CHECK_EQ(cudaEventQuery(two.event), cudaErrorStreamCaptureUnsupported);
  CHECK_EQ(cudaStreamEndCapture(two.first, &graph), cudaErrorStreamCaptureInvalidated);
  CHECK_EQ(cudaEventSynchronize(two.event), cudaSuccess);
  CHECK_EQ(cudaStreamBeginCapture(two.first, cudaStreamCaptureModeGlobal), cudaSuccess);
  CHECK_EQ(cudaEventRecord(two.event, two.first), cudaSuccess);
  CHECK_EQ(cudaStreamEndCapture(two.first, &graph), cudaSuccess);
  CHECK_EQ(cudaStreamWaitEvent(two.second, two.event, 0), cudaErrorCapturedEvent);
  cudaGraphDestroy(graph);
  cudaGetLastError();
}

}  // namespace syncengine
