#include "c10d/torch_work.h"

#include <algorithm>

#include "base/error.h"
#include "base/thread.h"

namespace syncengine {

namespace {

thread_local Completer* running = nullptr;  // the completer whose thread this is

}  // namespace

void Completer::add(c10::intrusive_ptr<TorchWork> work) {
  if (running != nullptr) running->pass_turn_on();
  {
    std::lock_guard lock(mutex_);
    if (!stopped_) {
      works_.push_back(std::move(work));
      try {
        return call_another();
      } catch (...) {
        works_.pop_back();  // the caller has got no future, and may ask again
        throw;
      }
    }
  }
  work->complete_future();  // the communicator is closed
}

// Wakes or starts another thread for works that are left, unless one waits for them already. Called under the lock.
void Completer::call_another() {
  if (works_.empty() || (holder_ != std::thread::id() && turn_ends_ == kNever)) return;
  if (idle_ > 0) return changed_.notify_one();
  threads_.push_back(start_thread([self = shared_from_this()] { self->run(); }));
  ++idle_;
}

// Gives up the turn; called by a callback that may wait for other futures next.
void Completer::pass_turn_on() {
  std::lock_guard lock(mutex_);
  if (holder_ != std::this_thread::get_id()) return;
  holder_ = {};
  call_another();
}

void Completer::stop() {
  Lock lock(mutex_);
  stopped_ = true;
  changed_.notify_all();
  while (!threads_.empty()) {  // a callback that blocks may need one more thread to end
    auto threads = std::exchange(threads_, {});
    lock.unlock();
    for (std::thread& thread : threads) {
      if (running == this)
        thread.detach();  // a callback dropped the last reference to the backend
      else
        thread.join();
    }
    lock.lock();
  }
}

// Takes the next work and waits for its end: AsAdded the first one; AsEnded any that has ended or is past its deadline.
// The engine's own thread makes progress with works for which no thread waits (Engine::thread_main).
c10::intrusive_ptr<TorchWork> Completer::next(Lock& lock) {
  auto chosen = works_.begin();
  auto is_due = [](const auto& work) { return work->ended() || work->is_late(); };
  while (order_ == Order::AsEnded && (chosen = std::find_if(works_.begin(), works_.end(), is_due)) == works_.end())
    changed_.wait_for(lock, std::chrono::milliseconds(1));
  auto work = std::move(*chosen);
  works_.erase(chosen);
  lock.unlock();
  work->await_end([this] { keep_deadlines(); });
  lock.lock();
  return work;
}

// Fails a work that is past its deadline, while this thread waits for another: later works may have shorter deadlines.
void Completer::keep_deadlines() {
  c10::intrusive_ptr<TorchWork> late;
  {
    std::lock_guard lock(mutex_);
    auto found = std::find_if(works_.begin(), works_.end(), [](const auto& work) { return work->is_late(); });
    if (found != works_.end()) late = *found;
  }
  if (late) late->await_end({});
}

// Waits for the turn and for a work; returns false when stop() has been called and no work is left.
bool Completer::take_turn(Lock& lock) {
  while (works_.empty() || (holder_ != std::thread::id() && Clock::now() < turn_ends_)) {
    if (works_.empty() && stopped_) return false;
    if (works_.empty() || turn_ends_ == kNever)
      changed_.wait(lock);
    else
      changed_.wait_until(lock, turn_ends_);
  }
  holder_ = std::this_thread::get_id();
  turn_ends_ = kNever;
  return true;
}

void Completer::run() {
  begin_thread("syncengine-c10d");
  running = this;
  Lock lock(mutex_);
  while (take_turn(lock)) {
    --idle_;
    auto work = next(lock);
    turn_ends_ = Clock::now() + kPatience;
    try {
      call_another();
    } catch (const Error&) {
      // The system has no thread left, so this one runs the other works' callbacks, too, after these.
    }
    lock.unlock();
    work->complete_future();
    work.reset();
    lock.lock();
    if (holder_ == std::this_thread::get_id()) holder_ = {};
    ++idle_;
  }
  --idle_;
  changed_.notify_all();
}

}  // namespace syncengine
