#include "reducer/torch/in_flight.h"

#include <torch/csrc/utils/pybind.h>

#include <algorithm>
#include <optional>

#include "reducer/torch/python_error.h"
#include "reducer/torch/tensors.h"

namespace syncengine {

namespace {

// Whether or not the caller has it.
struct WithoutGil {
  WithoutGil() {
    if (PyGILState_Check()) released.emplace();
  }
  std::optional<pybind11::gil_scoped_release> released;
};

}  // namespace

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

bool InFlight::Call::has_ended() const {
  return std::all_of(works.begin(), works.end(), [](const auto& weak) {
    const auto work = weak.lock();
    return !work || work->ended();
  });
}

void InFlight::Call::finish() const {
  for (const auto& weak : works) {
    const auto work = weak.lock();
    const auto engine = communicator.lock();
    if (!work || !engine) continue;
    if (work->state() == Work::State::Failed) return;  // whoever waits for it hears of it
    engine->wait(work, raise_pending_signal);
  }
  if (deliver) deliver();
}

void InFlight::add(Call call) {
  const WithoutGil without_gil;
  finish_ended();
  std::lock_guard lock(mutex_);
  calls_.push_back(std::move(call));
  any_.store(true, std::memory_order_relaxed);
}

// What is dropped may hold the last reference to a tensor besides Python's: it goes without the lock.
void InFlight::finish_ended() {
  std::vector<Call> ended;
  {
    std::lock_guard lock(mutex_);
    auto first =
        std::stable_partition(calls_.begin(), calls_.end(), [](const Call& call) { return !call.has_ended(); });
    std::move(first, calls_.end(), std::back_inserter(ended));
    calls_.erase(first, calls_.end());
    any_.store(!calls_.empty(), std::memory_order_relaxed);
  }
  for (const Call& call : ended) {
    try {
      call.finish();
    } catch (...) {  // its own wait throws it again
    }
  }
}

void InFlight::await_those_on(const Extent& extent, bool copies) {
  std::vector<Call> earlier;
  {
    std::lock_guard lock(mutex_);
    std::copy_if(calls_.begin(), calls_.end(), std::back_inserter(earlier), [&](const Call& call) {
      return (call.copies || copies) && std::any_of(call.memory.begin(), call.memory.end(), [&](const Extent& other) {
               return other.begin < extent.end && extent.begin < other.end;
             });
    });
  }
  if (earlier.empty()) return;
  const WithoutGil without_gil;
  for (const Call& call : earlier) call.finish();
}

}  // namespace syncengine
