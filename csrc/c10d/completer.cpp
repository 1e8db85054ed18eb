#include "c10d/completer.h"

#include <algorithm>

#include "base/thread.h"
#include "c10d/torch_work.h"

namespace syncengine {

void Completer::add(c10::intrusive_ptr<TorchWork> work) {
  std::lock_guard lock(mutex_);
  works_.push_back(std::move(work));
  if (!thread_.joinable() && !stopped_) thread_ = std::thread([self = shared_from_this()] { self->run(); });
  changed_.notify_one();
}

void Completer::stop() {
  std::thread thread;
  {
    std::lock_guard lock(mutex_);
    stopped_ = true;
    thread.swap(thread_);
    changed_.notify_one();
  }
  if (!thread.joinable()) return;
  if (thread.get_id() == std::this_thread::get_id())
    thread.detach();  // a callback dropped the last reference to the backend
  else
    thread.join();
}

// Brings one that has ended to the front. The engine's thread moves them: see Engine::thread_main.
void Completer::wait_for_one(std::unique_lock<std::mutex>& lock) {
  auto has_ended = [](const auto& work) { return work->ended(); };
  auto ended = std::find_if(works_.begin(), works_.end(), has_ended);
  for (; ended == works_.end(); ended = std::find_if(works_.begin(), works_.end(), has_ended))
    changed_.wait_for(lock, std::chrono::milliseconds(1));
  std::rotate(works_.begin(), ended, ended + 1);
}

void Completer::run() {
  begin_thread("syncengine-c10d");
  std::unique_lock lock(mutex_);
  while (true) {
    changed_.wait(lock, [this] { return stopped_ || !works_.empty(); });
    if (works_.empty()) return;
    if (order_ == Order::AsEnded) wait_for_one(lock);
    auto work = std::move(works_.front());
    works_.pop_front();
    lock.unlock();
    work->complete_future();
    work.reset();
    lock.lock();
  }
}

}  // namespace syncengine
