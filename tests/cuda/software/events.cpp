// Events: a place in a stream's order, for which other streams and the host wait.
#include <condition_variable>
#include <mutex>

#include "machine.h"

namespace software {

namespace {

// Of one cudaEventRecord.
struct Mark {
  Captured captured;
  int device;
  std::mutex mutex;
  std::condition_variable changed;
  bool reached = false;

  void reach() {
    std::lock_guard lock(mutex);
    reached = true;
    changed.notify_all();
  }
  void wait() {
    std::unique_lock lock(mutex);
    changed.wait(lock, [&] { return reached; });
  }
  bool is_reached() {
    std::lock_guard lock(mutex);
    return reached;
  }
};

struct Event {
  int device;
  std::mutex mutex;
  std::shared_ptr<Mark> mark;  // the last one; null: never recorded

  std::shared_ptr<Mark> last() {
    std::lock_guard lock(mutex);
    return mark;
  }
};

Event* event_of(cudaEvent_t handle) { return reinterpret_cast<Event*>(handle); }

}  // namespace

}  // namespace software

using namespace software;

cudaError_t cudaEventCreateWithFlags(cudaEvent_t* handle, unsigned) {
  *handle = reinterpret_cast<cudaEvent_t>(new Event{.device = current_device()});
  return cudaSuccess;
}

// Who waits already has what it waits for.
cudaError_t cudaEventDestroy(cudaEvent_t handle) {
  delete event_of(handle);
  return cudaSuccess;
}

cudaError_t cudaEventRecord(cudaEvent_t handle, cudaStream_t stream_handle) {
  const auto stream = stream_of(stream_handle);
  Event* event = event_of(handle);
  if (!stream || !event || device_of(*stream) != event->device) return fail(cudaErrorInvalidResourceHandle);
  auto mark = std::make_shared<Mark>();
  mark->captured = captured(stream);
  if (!mark->captured.capture) enqueue(stream, [mark] { mark->reach(); });
  std::lock_guard lock(event->mutex);
  event->mark = std::move(mark);
  return cudaSuccess;
}

// What the event was recorded for last, when this is called.
cudaError_t cudaStreamWaitEvent(cudaStream_t stream_handle, cudaEvent_t handle, unsigned flags) {
  const auto stream = stream_of(stream_handle);
  if (!stream || !handle) return fail(cudaErrorInvalidResourceHandle);
  if (flags != cudaEventWaitDefault) return fail(cudaErrorInvalidValue);
  const auto mark = event_of(handle)->last();
  if (!mark) return cudaSuccess;
  if (cudaError_t status = join(stream, mark->captured); status != cudaSuccess) return fail(status);
  if (!mark->captured.capture) enqueue(stream, [mark] { mark->wait(); });
  return cudaSuccess;
}

cudaError_t cudaEventQuery(cudaEvent_t handle) {
  if (spoils_capture()) return fail(cudaErrorStreamCaptureUnsupported);
  const auto mark = event_of(handle)->last();
  if (mark && mark->captured.capture) return fail(cudaErrorCapturedEvent);
  return !mark || mark->is_reached() ? cudaSuccess : cudaErrorNotReady;
}

cudaError_t cudaEventSynchronize(cudaEvent_t handle) {
  if (spoils_capture()) return fail(cudaErrorStreamCaptureUnsupported);
  const auto mark = event_of(handle)->last();
  if (mark && mark->captured.capture) return fail(cudaErrorCapturedEvent);
  if (mark) mark->wait();
  return cudaSuccess;
}
