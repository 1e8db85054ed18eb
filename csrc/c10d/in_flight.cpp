#include "c10d/in_flight.h"

#include <algorithm>
#include <utility>

#include "reducer/torch/python_error.h"
#include "reducer/torch/tensors.h"
#include "streams/without_gil.h"

namespace syncengine {

Extent extent_of(const at::Tensor& tensor) {
  if (!why_not_dense(tensor).empty() || !tensor.has_storage() || tensor.numel() == 0) return {};
  int64_t last = 0;
  for (int64_t i = 0; i < tensor.dim(); ++i) last += (tensor.size(i) - 1) * tensor.stride(i);
  const auto begin = reinterpret_cast<uintptr_t>(tensor.const_data_ptr());
  return {begin, begin + (last + 1) * tensor.element_size()};
}

InFlight& InFlight::of_process() {
  static auto& instance = *new InFlight;
  return instance;
}

bool InFlight::PendingCall::has_ended() const {
  return std::all_of(works.begin(), works.end(), [](const auto& weak) {
    const auto work = weak.lock();
    return !work || work->ended();
  });
}

void InFlight::PendingCall::await() const {
  for (const auto& weak : works) {
    const auto work = weak.lock();
    const auto engine = communicator.lock();
    if (!work || !engine) continue;
    if (work->state() == Work::State::Failed) return;  // the error goes to whoever waits for that call
    engine->wait(work, raise_pending_signal);
  }
}

void InFlight::add(PendingCall call) {
  drop_ended();
  std::lock_guard lock(mutex_);
  calls_.push_back(std::make_shared<PendingCall>(std::move(call)));
  set_flags();
}

// Sets the flags that tell whether there is any call to wait for, or to deliver. Called under the lock.
void InFlight::set_flags() {
  const auto delivers = [](const auto& call) { return call->deliver != nullptr; };
  any_.store(!calls_.empty(), std::memory_order_release);
  any_to_deliver_.store(std::any_of(calls_.begin(), calls_.end(), delivers), std::memory_order_release);
}

// Delivers the calls that have ended, then drops them: not before, so that no other thread takes them for delivered.
// They are destroyed without the lock: where a tensor's last reference besides Python's goes, torch waits for the GIL.
void InFlight::drop_ended() {
  const WithoutGil without_gil;
  std::vector<std::shared_ptr<PendingCall>> ended;
  {
    std::lock_guard lock(mutex_);
    std::copy_if(calls_.begin(), calls_.end(), std::back_inserter(ended),
                 [](const auto& call) { return call->has_ended(); });
  }
  if (ended.empty()) return;
  for (const auto& call : ended)
    if (call->deliver) call->deliver();
  std::lock_guard lock(mutex_);
  for (const auto& call : ended) call->dropped = true;
  std::erase_if(calls_, [](const auto& call) { return call->dropped; });
  set_flags();
}

void InFlight::await_those_on(const Extent& extent, bool unordered) {
  std::vector<std::shared_ptr<PendingCall>> earlier;
  {
    std::lock_guard lock(mutex_);
    std::copy_if(calls_.begin(), calls_.end(), std::back_inserter(earlier), [&](const auto& call) {
      return (call->deliver || call->by_messages || unordered) &&
             std::any_of(call->memory.begin(), call->memory.end(), [&](const Extent& other) {
               return (other.written || extent.written) && other.begin < extent.end && extent.begin < other.end;
             });
    });
  }
  if (earlier.empty()) return;
  const WithoutGil without_gil;
  const auto awaited = std::move(earlier);  // dropped without the GIL, too: a call may be its communicator's last owner
  for (const auto& call : awaited) call->await();
  drop_ended();
}

}  // namespace syncengine
