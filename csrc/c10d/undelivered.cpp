#include "c10d/undelivered.h"

#include <algorithm>

#include "c10d/torch_work.h"

namespace syncengine {

void Undelivered::add(WorkPtr work) {
  std::lock_guard lock(mutex_);
  works_.push_back(std::move(work));
  any_.store(true, std::memory_order_relaxed);
}

void Undelivered::remove(const TorchWork& work) {
  WorkPtr removed;  // let go of without the lock: it may hold the last reference to a tensor of Python's
  std::lock_guard lock(mutex_);
  auto found = std::find_if(works_.begin(), works_.end(), [&](const WorkPtr& other) { return other.get() == &work; });
  if (found == works_.end()) return;
  removed = std::move(*found);
  works_.erase(found);
  any_.store(!works_.empty(), std::memory_order_relaxed);
}

// They stay in the list meanwhile, so that another thread does not take them for delivered.
void Undelivered::deliver_all_ended() {
  std::vector<WorkPtr> ended;
  {
    std::lock_guard lock(mutex_);
    std::copy_if(works_.begin(), works_.end(), std::back_inserter(ended),
                 [](const WorkPtr& work) { return work->ended(); });
  }
  for (const WorkPtr& work : ended) {
    if (work->isSuccess()) work->deliver();
    remove(*work);
  }
}

void Undelivered::close() noexcept {
  deliver_ended();
  std::vector<WorkPtr> dropped;
  std::lock_guard lock(mutex_);
  dropped.swap(works_);
  any_.store(false, std::memory_order_relaxed);
}

}  // namespace syncengine
