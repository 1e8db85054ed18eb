// What a communicator knows of the links between its hosts, and how it measures them.

#include <algorithm>
#include <vector>

#include "collectives/interhost_plan.h"
#include "engine/communicator/engine_communicator.h"

namespace syncengine {

namespace {

constexpr uint64_t kChannel = 2;  // 0 and 1: the program's, and its collectives'
constexpr int kPings = 7, kBursts = 3, kBurst = 24;
constexpr size_t kFirstBytes = 256 << 10, kLastBytes = 4 << 20;
constexpr double kEnough = 5e-3;  // seconds

std::string what() { return "syncengine.init()"; }

// The first rank of each host sends to that of the next one, and receives from that of the one before.
class Measurement {
 public:
  Measurement(Communicator& communicator, const Placement& placement, const std::function<void()>& interrupted)
      : communicator_(communicator), interrupted_(interrupted), takes_part_(placement.locals()[0] == placement.rank) {
    int hosts = placement.hosts();
    next_ = placement.members[(placement.host + 1) % hosts][0];
    previous_ = placement.members[(placement.host + hosts - 1) % hosts][0];
  }

  // Seconds for `count` messages at once, of the rank that takes longest.
  double time(int count, size_t bytes) {
    double seconds = takes_part_ ? exchange(count, bytes) : 0;
    Operation slowest{.dtype = DType::Float64, .op = ReduceOp::Max, .input = {&seconds, sizeof(seconds)}};
    slowest.output = slowest.input;
    slowest.describe = what;
    communicator_.run(std::move(slowest), interrupted_);
    return seconds;
  }

 private:
  double exchange(int count, size_t bytes) {
    sent_.resize(std::max(sent_.size(), bytes));
    received_.resize(std::max(received_.size(), bytes * count));
    std::vector<std::shared_ptr<Work>> works;
    auto begin = Clock::now();
    for (int i = 0; i < count; ++i) {
      auto* place = received_.data() + bytes * i;
      works.push_back(
          communicator_.receive({.peer = previous_, .channel = kChannel, .memory = {place, bytes}, .describe = what}));
    }
    for (int i = 0; i < count; ++i)
      works.push_back(
          communicator_.send({.peer = next_, .channel = kChannel, .memory = {sent_.data(), bytes}, .describe = what}));
    for (const auto& work : works) communicator_.wait(work, interrupted_);
    return std::chrono::duration<double>(Clock::now() - begin).count();
  }

  Communicator& communicator_;
  const std::function<void()>& interrupted_;
  bool takes_part_;
  int next_, previous_;
  std::vector<std::byte> sent_, received_;
};

}  // namespace

// A few short messages, then longer ones until one takes 5 ms or has 4 MiB. On a link of 1 Gbit/s some 20 ms in all.
// The speed is the same on all ranks: that of the slowest link from a host to the next one, all of them used at once.
void EngineCommunicator::measure_links(const std::function<void()>& interrupted) {
  if (!interhost_ || !interhost_->depends_on_speed()) return;
  Measurement links(*this, placement_, interrupted);
  LinkSpeed speed;
  std::vector<double> pings(kPings), bursts(kBursts);
  for (double& seconds : pings) seconds = links.time(1, 8);
  for (double& seconds : bursts) seconds = links.time(kBurst, 8);
  std::nth_element(pings.begin(), pings.begin() + kPings / 2, pings.end());
  speed.latency = pings[kPings / 2];
  speed.overhead = std::max(1e-6, (*std::min_element(bursts.begin(), bursts.end()) - speed.latency) / kBurst);
  size_t bytes = kFirstBytes;
  double seconds = links.time(1, bytes);
  while (seconds < kEnough && bytes < kLastBytes) seconds = links.time(1, bytes *= 2);
  // The header and the receiver's consent go before the bytes.
  speed.bandwidth = static_cast<double>(bytes) / std::max(seconds - 3 * speed.latency, seconds / 4);
  interhost_->set_speed(speed);
}

std::string EngineCommunicator::describe_links() const { return interhost_ ? interhost_->describe_links() : ""; }

bool EngineCommunicator::has_device_transport() const {
  return interhost_ && interhost_->interhost().has_device_transport();
}

std::unique_ptr<DeviceTransport> EngineCommunicator::open_device_transport(int device, const std::string& name) {
  return interhost_ ? interhost_->interhost().open_device_transport(interhost_->job_ranks(), device, name) : nullptr;
}

}  // namespace syncengine
