#include "cuda/proxy.h"

#include <cstring>
#include <utility>

#include "base/thread.h"
#include "cuda/control.h"

namespace syncengine::cuda {

Proxy::Proxy(std::shared_ptr<Communicator> parent, std::shared_ptr<Communicator> own)
    : parent_(std::move(parent)), own_(std::move(own)), thread_([this] { run(); }) {}

void Proxy::post(std::shared_ptr<const Posted> posted) {
  {
    std::lock_guard lock(mutex_);
    if (!stopping_) return posted_.push_back(std::move(posted)), changed_.notify_one();
  }
  end(*posted, false);  // by a graph that is replayed too late
}

void Proxy::stop() {
  {
    std::lock_guard lock(mutex_);
    stopping_ = true;
  }
  changed_.notify_one();
  if (!thread_.joinable()) return;
  thread_.join();
  own_->close();
  own_.reset();  // a graph's callbacks may keep this object longer than communicators should live
  parent_.reset();
}

void Proxy::run() {
  begin_thread("syncengine-cuda");
  std::unique_lock lock(mutex_);
  for (;;) {
    changed_.wait(lock, [this] { return !posted_.empty() || !started_.empty() || stopping_; });
    if (posted_.empty() && started_.empty()) return;
    auto posted = std::exchange(posted_, {});
    lock.unlock();
    for (auto& next : posted) start(std::move(next));
    finish_oldest();
    lock.lock();
  }
}

void Proxy::start(std::shared_ptr<const Posted> posted) {
  std::shared_ptr<Work> work;
  succeeds([&] { work = own_->submit(posted->operation); });
  started_.push_back({std::move(posted), std::move(work)});
}

void Proxy::finish_oldest() {
  const auto [posted, work] = std::move(started_.front());
  started_.pop_front();
  end(*posted, work && succeeds([&] { own_->wait(work, [this] { parent_->throw_if_failed(); }); }));
}

// Who asks the parent hears of it, on all ranks.
template <class Step>
bool Proxy::succeeds(Step&& step) {
  try {
    step();
    return true;
  } catch (const Error& error) {
    parent_->abort(error.kind(), error.what());
  } catch (const std::exception& error) {  // out of memory, say
    parent_->abort(ErrorKind::Aborted, error.what());
  }
  return false;
}

// Nothing that was not reduced may look like a result: ones in all bits are NaN.
void Proxy::end(const Posted& posted, bool has_result) {
  if (!has_result)
    for (const Span& span : posted.operation.output.spans()) std::memset(span.data, 0xff, span.bytes);
  store(*posted.word, kArrived);
}

}  // namespace syncengine::cuda
