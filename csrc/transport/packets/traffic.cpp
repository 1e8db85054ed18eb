#include "transport/packets/traffic.h"

#include <cassert>
#include <mutex>

namespace syncengine::packets {

namespace {

constexpr size_t kMostSpare = 32;

}  // namespace

Traffic::~Traffic() {
  static std::mutex mutex;
  static auto* kept = new std::vector<std::unordered_map<uint64_t, InFlight>>;  // reachable, never deleted
  std::lock_guard lock(mutex);
  if (!in_flight_.empty()) kept->push_back(std::move(in_flight_));
}

Buffer Traffic::take(size_t bytes) {
  Buffer buffer;
  if (bytes > kControlBytes && !spare_.empty()) {
    buffer = std::move(spare_.back());
    spare_.pop_back();
    return buffer;
  }
  buffer.large_ = bytes > kControlBytes;
  buffer.memory_ = std::make_unique_for_overwrite<std::byte[]>(buffer.large_ ? kMostBytes : kControlBytes);
  return buffer;
}

void Traffic::give_back(Buffer buffer) {
  if (buffer.large_ && spare_.size() < kMostSpare) spare_.push_back(std::move(buffer));
}

uint64_t Traffic::post(int peer, bool outgoing, Buffer buffer, size_t bytes) {
  posts_.push_back({++last_, peer, outgoing, buffer.data(), bytes});
  in_flight_.emplace(last_, InFlight{peer, std::move(buffer)});
  return last_;
}

Traffic::InFlight Traffic::end(uint64_t id) {
  auto found = in_flight_.find(id);
  assert(found != in_flight_.end());
  InFlight packet = std::move(found->second);
  in_flight_.erase(found);
  return packet;
}

}  // namespace syncengine::packets
