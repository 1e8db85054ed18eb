#include "c10d/torch_transports.h"

#include <ATen/ops/from_blob.h>

#include <condition_variable>
#include <deque>
#include <mutex>
#include <string>
#include <thread>
#include <torch/csrc/distributed/c10d/Work.hpp>
#include <vector>

#include "base/thread.h"
#include "c10d/torch_work.h"

namespace syncengine {

namespace {

// The first line of the exception that `call` throws, or "" if it throws none.
template <class Call>
std::string words_of(const Call& call) {
  try {
    call();
    return "";
  } catch (const std::exception&) {
    const std::string text = text_of(std::current_exception());
    return text.substr(0, std::min<size_t>(text.find('\n'), 300));
  }
}

using GroupWork = c10::intrusive_ptr<::c10d::Work>;

constexpr std::chrono::hours kForEver(24 * 365 * 30);  // the engine has deadlines of its own

}  // namespace

// The sent, received and failed packets of all peers, until step() returns them.
struct TorchPacketTransport::Ends {
  void add(End end) {
    std::lock_guard lock(mutex);
    list.push_back(std::move(end));
    if (wake) wake();
  }

  std::mutex mutex;
  std::vector<End> list;
  std::function<void()> wake;  // null when the transport is closed
};

// Messages to one peer, or from it: works end in the order in which they were posted. If a work can't be aborted, the
// direction's thread outlives the transport.
class TorchPacketTransport::Direction : public std::enable_shared_from_this<Direction> {
 public:
  explicit Direction(std::shared_ptr<Ends> ends) : ends_(std::move(ends)) {}

  void add(uint64_t id, GroupWork work) {
    std::lock_guard lock(mutex_);
    works_.emplace_back(id, std::move(work));
    if (!thread_.joinable()) thread_ = start_thread([self = shared_from_this()] { self->run(); });
    changed_.notify_one();
  }

  void close() {
    bool stuck = false;
    {
      std::lock_guard lock(mutex_);
      closing_ = true;
      for (auto& [id, work] : works_) stuck |= !words_of([&, &work = work] { work->abort(); }).empty();
      changed_.notify_one();
    }
    if (!thread_.joinable()) return;
    if (stuck)
      thread_.detach();
    else
      thread_.join();
  }

 private:
  void run() {
    begin_thread("syncengine-c10d");
    std::unique_lock lock(mutex_);
    for (;;) {
      changed_.wait(lock, [&] { return closing_ || !works_.empty(); });
      if (closing_) return;
      auto [id, work] = works_.front();
      lock.unlock();
      bool done = false;
      std::string error = words_of([&, &work = work] { done = work->wait(kForEver); });
      if (error.empty() && !done) error = "the wait for it was aborted";
      ends_->add({id, std::move(error)});
      lock.lock();
      works_.pop_front();
    }
  }

  std::shared_ptr<Ends> ends_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<std::pair<uint64_t, GroupWork>> works_;
  bool closing_ = false;
  std::thread thread_;
};

TorchPacketTransport::TorchPacketTransport(c10::intrusive_ptr<::c10d::ProcessGroup> group, std::vector<int> ranks,
                                           int tag, std::function<void()> closed)
    : group_(std::move(group)), ranks_(std::move(ranks)), tag_(tag), closed_(std::move(closed)) {}

TorchPacketTransport::~TorchPacketTransport() { close(false); }

bool TorchPacketTransport::start(std::function<void()> wake) {
  ends_ = std::make_shared<Ends>();
  ends_->wake = std::move(wake);
  return true;
}

std::vector<packets::PacketTransport::End> TorchPacketTransport::step(const std::vector<Packet>& posts) {
  for (const Packet& packet : posts) {
    GroupWork work;
    std::string error = words_of([&] {
      std::vector<at::Tensor> tensors{at::from_blob(packet.data, {static_cast<int64_t>(packet.bytes)}, at::kByte)};
      int peer = ranks_.at(packet.peer);
      work = packet.outgoing ? group_->send(tensors, peer, tag_) : group_->recv(tensors, peer, tag_);
    });
    if (!error.empty()) {
      ends_->add({packet.id, std::move(error)});
      continue;
    }
    auto& direction = directions_[{packet.peer, packet.outgoing}];
    if (!direction) direction = std::make_shared<Direction>(ends_);
    direction->add(packet.id, std::move(work));
  }
  std::lock_guard lock(ends_->mutex);
  return std::exchange(ends_->list, {});
}

void TorchPacketTransport::close(bool) {
  if (!group_) return;
  if (ends_) {
    std::lock_guard lock(ends_->mutex);
    ends_->wake = nullptr;
  }
  for (auto& [way, direction] : directions_) direction->close();
  directions_.clear();
  group_.reset();
  closed_();
}

}  // namespace syncengine
