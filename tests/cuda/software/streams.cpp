// Streams, each worked off by a thread, and graphs, which are recorded steps.
#include <atomic>
#include <condition_variable>
#include <deque>
#include <map>
#include <mutex>
#include <thread>
#include <utility>

#include "machine.h"

namespace software {

namespace {
struct Graph {
  std::vector<Step> steps;
};
}  // namespace

// What is recorded, in the order of the calls: streams that wait for an event of a captured one are captured with it.
struct Capture {
  Graph graph;
  bool global;                                   // no thread may make calls that spoil it
  std::vector<std::shared_ptr<Stream>> streams;  // the first is the one that is captured
  bool ended = false;
};

struct Stream {
  Stream(int device, bool blocking) : device(device), blocking(blocking) {}

  const int device;
  const bool blocking;  // is ordered with the default stream
  std::mutex mutex;
  std::condition_variable changed;
  std::deque<Step> steps;
  uint64_t queued = 0, done = 0;
  bool closing = false;
  std::shared_ptr<Capture> capture;
  uint64_t captured = 0;  // steps
  bool loose = false;     // has captured steps for which no other stream of the capture waits

  uint64_t push(Step step) {
    std::lock_guard lock(mutex);
    steps.push_back(std::move(step));
    changed.notify_all();
    return ++queued;
  }
  uint64_t count() {
    std::lock_guard lock(mutex);
    return queued;
  }
  void wait(uint64_t until) {
    std::unique_lock lock(mutex);
    changed.wait(lock, [&] { return done >= until; });
  }
  void close() {
    std::lock_guard lock(mutex);
    closing = true;
    changed.notify_all();
  }
  void work() {
    std::unique_lock lock(mutex);
    for (;;) {
      changed.wait(lock, [&] { return !steps.empty() || closing; });
      if (steps.empty()) return;
      const Step step = std::move(steps.front());
      steps.pop_front();
      lock.unlock();
      dawdle();
      step();
      lock.lock();
      ++done;
      changed.notify_all();
    }
  }
};

namespace {

std::mutex mutex;  // guards the next three, and the order between default streams and others
auto& streams = *new std::map<cudaStream_t, std::shared_ptr<Stream>>;
auto& destroyed = *new std::vector<std::weak_ptr<Stream>>;  // kept by their threads until what was queued has run
auto& defaults = *new std::map<int, std::shared_ptr<Stream>>;
std::atomic<int> captures = 0, spoiled = 0;  // the global ones
thread_local int own_captures = 0;
thread_local cudaStreamCaptureMode mode = cudaStreamCaptureModeGlobal;

std::shared_ptr<Stream> start(int device, bool blocking) {
  auto stream = std::make_shared<Stream>(device, blocking);
  std::thread([stream] { stream->work(); }).detach();
  return stream;
}

void wait_for_all(const std::vector<std::pair<std::shared_ptr<Stream>, uint64_t>>& waits) {
  for (auto& [stream, count] : waits) stream->wait(count);
}

}  // namespace

std::shared_ptr<Stream> stream_of(cudaStream_t handle) {
  const int device = current_device();
  std::lock_guard lock(mutex);
  if (!handle || handle == cudaStreamLegacy) {
    auto& stream = defaults[device];
    return stream ? stream : stream = start(device, true);
  }
  auto found = streams.find(handle);
  return found == streams.end() ? nullptr : found->second;
}

int device_of(const Stream& stream) { return stream.device; }

uint64_t enqueue(const std::shared_ptr<Stream>& stream, Step step) {
  std::lock_guard lock(mutex);
  if (stream->capture) {
    stream->capture->graph.steps.push_back(std::move(step));
    stream->loose = stream != stream->capture->streams[0];
    ++stream->captured;
    return 0;
  }
  std::vector<std::pair<std::shared_ptr<Stream>, uint64_t>> before;
  auto& other = defaults[stream->device];
  if (stream == other) {
    for (auto& [handle, candidate] : streams)
      if (candidate->device == stream->device && candidate->blocking)
        before.emplace_back(candidate, candidate->count());
  } else if (stream->blocking && other) {
    before.emplace_back(other, other->count());
  }
  return stream->push([before = std::move(before), step = std::move(step)] {
    wait_for_all(before);
    step();
  });
}

void run_and_wait(const std::shared_ptr<Stream>& stream, Step step) { stream->wait(enqueue(stream, std::move(step))); }

void synchronize(int device) {
  std::vector<std::pair<std::shared_ptr<Stream>, uint64_t>> all;
  {
    std::lock_guard lock(mutex);
    for (auto& [handle, stream] : streams)
      if (stream->device == device) all.emplace_back(stream, stream->count());
    for (auto& ending : destroyed)
      if (const auto stream = ending.lock(); stream && stream->device == device)
        all.emplace_back(stream, stream->count());
    if (auto& stream = defaults[device]) all.emplace_back(stream, stream->count());
  }
  wait_for_all(all);
}

bool spoils_capture() {
  if (mode == cudaStreamCaptureModeRelaxed || (captures == 0 && own_captures == 0)) return false;
  spoiled = 1;
  return true;
}

Captured captured(const std::shared_ptr<Stream>& stream) {
  std::lock_guard lock(mutex);
  return {stream->capture, stream, stream->captured};
}

cudaError_t join(const std::shared_ptr<Stream>& stream, const Captured& leader) {
  std::lock_guard lock(mutex);
  if (!leader.capture) return stream->capture ? cudaErrorStreamCaptureIsolation : cudaSuccess;
  if (leader.capture->ended) return cudaErrorCapturedEvent;
  if (stream->capture && stream->capture != leader.capture) return cudaErrorStreamCaptureMerge;
  if (stream == leader.stream) return cudaSuccess;
  if (!stream->capture) {
    stream->capture = leader.capture;
    leader.capture->streams.push_back(stream);
  }
  if (leader.stream->captured == leader.steps) leader.stream->loose = false;
  stream->loose = stream != leader.capture->streams[0];
  return cudaSuccess;
}

}  // namespace software

using namespace software;

cudaError_t cudaStreamCreateWithFlags(cudaStream_t* handle, unsigned flags) {
  if (flags != cudaStreamDefault && flags != cudaStreamNonBlocking) return fail(cudaErrorInvalidValue);
  auto stream = start(current_device(), flags == cudaStreamDefault);
  *handle = reinterpret_cast<cudaStream_t>(stream.get());
  std::lock_guard lock(mutex);
  streams[*handle] = stream;
  return cudaSuccess;
}

// Returns at once; what was queued still runs, and a synchronized device waits for that.
cudaError_t cudaStreamDestroy(cudaStream_t handle) {
  std::lock_guard lock(mutex);
  auto found = streams.find(handle);
  if (found == streams.end()) return fail(cudaErrorInvalidResourceHandle);
  found->second->close();
  std::erase_if(destroyed, [](const auto& ending) { return ending.expired(); });
  destroyed.push_back(found->second);
  streams.erase(found);
  return cudaSuccess;
}

cudaError_t cudaStreamSynchronize(cudaStream_t handle) {
  const auto stream = stream_of(handle);
  if (!stream) return fail(cudaErrorInvalidResourceHandle);
  if (stream->capture) return spoils_capture(), fail(cudaErrorStreamCaptureUnsupported);
  run_and_wait(stream, [] {});
  return cudaSuccess;
}

cudaError_t cudaStreamQuery(cudaStream_t handle) {
  const auto stream = stream_of(handle);
  if (!stream) return fail(cudaErrorInvalidResourceHandle);
  if (stream->capture || spoils_capture()) return spoils_capture(), fail(cudaErrorStreamCaptureUnsupported);
  std::lock_guard lock(stream->mutex);
  return stream->done == stream->queued ? cudaSuccess : cudaErrorNotReady;
}

cudaError_t cudaDeviceSynchronize() {
  if (spoils_capture()) return fail(cudaErrorStreamCaptureUnsupported);
  synchronize(current_device());
  return cudaSuccess;
}

// The callback must not call CUDA, and gets no device.
cudaError_t cudaLaunchHostFunc(cudaStream_t handle, cudaHostFn_t callback, void* data) {
  const auto stream = stream_of(handle);
  if (!stream) return fail(cudaErrorInvalidResourceHandle);
  if (!callback) return fail(cudaErrorInvalidValue);
  enqueue(stream, [callback, data] { callback(data); });
  return cudaSuccess;
}

cudaError_t cudaStreamIsCapturing(cudaStream_t handle, cudaStreamCaptureStatus* status) {
  const auto stream = stream_of(handle);
  if (!stream) return fail(cudaErrorInvalidResourceHandle);
  *status = stream->capture ? cudaStreamCaptureStatusActive : cudaStreamCaptureStatusNone;
  return cudaSuccess;
}

cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode* exchanged) {
  std::swap(*exchanged, mode);
  return cudaSuccess;
}

cudaError_t cudaStreamBeginCapture(cudaStream_t handle, cudaStreamCaptureMode how) {
  const auto stream = stream_of(handle);
  if (!stream) return fail(cudaErrorInvalidResourceHandle);
  if (!handle || handle == cudaStreamLegacy || stream->capture) return fail(cudaErrorStreamCaptureUnsupported);
  std::lock_guard lock(mutex);
  stream->capture =
      std::make_shared<Capture>(Capture{.global = how == cudaStreamCaptureModeGlobal, .streams = {stream}});
  captures += stream->capture->global;
  own_captures += how == cudaStreamCaptureModeThreadLocal;
  return cudaSuccess;
}

cudaError_t cudaStreamEndCapture(cudaStream_t handle, cudaGraph_t* graph) {
  *graph = nullptr;
  const auto stream = stream_of(handle);
  std::lock_guard lock(mutex);
  if (!stream || !stream->capture || stream->capture->streams[0] != stream) return fail(cudaErrorInvalidResourceHandle);
  const auto capture = stream->capture;
  capture->ended = true;
  bool loose = false;
  for (auto& member : capture->streams) {
    loose |= std::exchange(member->loose, false);
    member->capture.reset();
  }
  captures -= capture->global;
  if (!capture->global && own_captures > 0) --own_captures;
  if (spoiled.exchange(0)) return fail(cudaErrorStreamCaptureInvalidated);
  if (loose) return fail(cudaErrorStreamCaptureUnjoined);
  *graph = reinterpret_cast<cudaGraph_t>(new Graph(std::move(capture->graph)));
  return cudaSuccess;
}

cudaError_t cudaGraphInstantiate(cudaGraphExec_t* executable, cudaGraph_t graph, unsigned long long) {
  *executable = reinterpret_cast<cudaGraphExec_t>(new Graph(*reinterpret_cast<Graph*>(graph)));
  return cudaSuccess;
}

cudaError_t cudaGraphLaunch(cudaGraphExec_t executable, cudaStream_t handle) {
  const auto stream = stream_of(handle);
  if (!stream) return fail(cudaErrorInvalidResourceHandle);
  for (const Step& step : reinterpret_cast<Graph*>(executable)->steps) enqueue(stream, step);
  return cudaSuccess;
}

cudaError_t cudaGraphDestroy(cudaGraph_t graph) {
  delete reinterpret_cast<Graph*>(graph);
  return cudaSuccess;
}

// What was launched has copies of the steps.
cudaError_t cudaGraphExecDestroy(cudaGraphExec_t executable) {
  delete reinterpret_cast<Graph*>(executable);
  return cudaSuccess;
}
