#include "transport/packets/traffic.h"

#include <cassert>
#include <mutex>

namespace syncengine::packets {

namespace {

constexpr size_t kMostSpare = 32;

}  // namespace

Traffic::~Traffic() {
  static std::mutex mutex;
  static auto* kept = new std::vector<std::unordered_map<uint64_t, Flight>>;  // reachable, never deleted
  std::lock_guard lock(mutex);
  if (!flights_.empty()) kept->push_back(std::move(flights_));
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
  flights_.emplace(last_, Flight{peer, std::move(buffer)});
  return last_;
}

Traffic::Flight Traffic::end(uint64_t id) {
  auto found = flights_.find(id);
  assert(found != flights_.end());
  Flight flight = std::move(found->second);
  flights_.erase(found);
  return flight;
}

}  // namespace syncengine::packets
