#include "c10d/torch_transports.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>
#include <c10/core/DeviceGuard.h>
#include <c10/util/Exception.h>

#include <condition_variable>
#include <deque>
#include <mutex>
#include <string>
#include <thread>
#include <torch/csrc/distributed/c10d/Work.hpp>
#include <vector>

#include "base/error.h"
#include "base/thread.h"
#include "streams/queue.h"

namespace syncengine {

namespace {

std::string first_line(std::string text) { return text.substr(0, std::min<size_t>(text.find('\n'), 300)); }

// What `call` throws, in words; "" if it throws nothing.
template <class Call>
std::string words_of(const Call& call) {
  try {
    call();
    return "";
  } catch (const c10::Error& error) {
    return first_line(error.what_without_backtrace());
  } catch (const std::exception& error) {
    return first_line(error.what());
  }
}

}  // namespace

// The work runs on a stream of the backend's; wait() has the current one wait for it.
template <class Call>
void TorchDeviceTransport::queue(const char* what, Call&& call) {
  const std::string error = words_of([&] { call()->wait(); });
  if (!error.empty())
    throw Error(ErrorKind::Aborted, backend_->getBackendName() + " can't queue " + what + ": " + error);
}

TorchDeviceTransport::TorchDeviceTransport(c10::intrusive_ptr<::c10d::Backend> backend, int device)
    : backend_(std::move(backend)), device_(kDeviceType, static_cast<c10::DeviceIndex>(device)) {}

// NCCL connects ranks by the first call of a kind, on the host.
void TorchDeviceTransport::connect() {
  const c10::DeviceGuard guard(device_);
  const int64_t bytes = 64, size = backend_->getSize();
  const auto options = at::TensorOptions().dtype(at::kByte).device(device_);
  const at::Tensor from = at::empty({size * bytes}, options), to = at::empty({size * bytes}, options);
  auto data = [](const at::Tensor& tensor) { return static_cast<std::byte*>(tensor.data_ptr()); };
  all_to_all(data(to), data(from), bytes);
  all_gather(data(to), data(from), bytes);
  broadcast(data(to), bytes, 0);
  current_stream(device_).synchronize();
}

void TorchDeviceTransport::all_to_all(std::byte* to, const std::byte* from, size_t bytes) {
  queue("all_to_all", [&] {
    at::Tensor output = tensor(to, bytes * backend_->getSize()), input = tensor(from, bytes * backend_->getSize());
    std::vector<int64_t> equal_parts;
    return backend_->alltoall_base(output, input, equal_parts, equal_parts);
  });
}

void TorchDeviceTransport::all_gather(std::byte* to, const std::byte* from, size_t bytes) {
  queue("all_gather", [&] {
    at::Tensor output = tensor(to, bytes * backend_->getSize()), input = tensor(from, bytes);
    return backend_->_allgather_base(output, input);
  });
}

void TorchDeviceTransport::broadcast(std::byte* memory, size_t bytes, int root) {
  queue("broadcast", [&] {
    std::vector<at::Tensor> tensors{tensor(memory, bytes)};
    ::c10d::BroadcastOptions options;
    options.rootRank = root;
    return backend_->broadcast(tensors, options);
  });
}

void TorchDeviceTransport::abort() {
  if (!aborted_.exchange(true)) backend_->abort();
}

void TorchDeviceTransport::close() {
  if (!aborted_.exchange(true)) backend_->shutdown();
  backend_.reset();
}

at::Tensor TorchDeviceTransport::tensor(const std::byte* memory, size_t bytes) const {
  return at::for_blob(const_cast<std::byte*>(memory), {static_cast<int64_t>(bytes)})
      .options(at::TensorOptions().dtype(at::kByte).device(device_))
      .target_device(device_)
      .make_tensor();
}

namespace {

using GroupWork = c10::intrusive_ptr<::c10d::Work>;

constexpr std::chrono::hours kForEver(24 * 365 * 30);  // the engine has deadlines of its own

}  // namespace

// What has ended, from all lanes.
class TorchPacketTransport::Ends {
 public:
  explicit Ends(std::function<void()> wake) : wake_(std::move(wake)) {}

  void add(End end) {
    std::lock_guard lock(mutex_);
    ends_.push_back(std::move(end));
    if (wake_) wake_();
  }
  std::vector<End> take() {
    std::lock_guard lock(mutex_);
    return std::exchange(ends_, {});
  }
  void be_silent() {
    std::lock_guard lock(mutex_);
    wake_ = nullptr;
  }

 private:
  std::mutex mutex_;
  std::vector<End> ends_;
  std::function<void()> wake_;
};

// One way of one peer: works end in the order in which they were posted. Its thread outlives it where a work can't be
// aborted.
class TorchPacketTransport::Lane : public std::enable_shared_from_this<Lane> {
 public:
  explicit Lane(std::shared_ptr<Ends> ends) : ends_(std::move(ends)) {}

  void add(uint64_t id, GroupWork work) {
    std::lock_guard lock(mutex_);
    works_.emplace_back(id, std::move(work));
    if (!thread_.joinable()) thread_ = std::thread([self = shared_from_this()] { self->run(); });
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
  ends_ = std::make_shared<Ends>(std::move(wake));
  return true;
}

TorchPacketTransport::Lane& TorchPacketTransport::lane(int peer, bool outgoing) {
  auto& lane = lanes_[{peer, outgoing}];
  if (!lane) lane = std::make_shared<Lane>(ends_);
  return *lane;
}

std::vector<packets::PacketTransport::End> TorchPacketTransport::step(const std::vector<Packet>& posts) {
  for (const Packet& packet : posts) {
    GroupWork work;
    std::string error = words_of([&] {
      std::vector<at::Tensor> tensors{at::from_blob(packet.data, {static_cast<int64_t>(packet.bytes)}, at::kByte)};
      int peer = ranks_.at(packet.peer);
      work = packet.outgoing ? group_->send(tensors, peer, tag_) : group_->recv(tensors, peer, tag_);
    });
    if (error.empty())
      lane(packet.peer, packet.outgoing).add(packet.id, std::move(work));
    else
      ends_->add({packet.id, std::move(error)});
  }
  return ends_->take();
}

void TorchPacketTransport::close(bool) {
  if (!group_) return;
  if (ends_) ends_->be_silent();
  for (auto& [way, lane] : lanes_) lane->close();
  lanes_.clear();
  group_.reset();
  closed_();
}

}  // namespace syncengine
