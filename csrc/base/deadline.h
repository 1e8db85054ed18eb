// One absolute point in time that every wait of an operation shares.
#pragma once

#include <algorithm>
#include <chrono>

namespace syncengine {

using Clock = std::chrono::steady_clock;
using Duration = Clock::duration;

// Converts seconds from a user. NaN and negative numbers count as 0; about thirty years (1e9 s) stand for no limit.
inline Duration seconds(double value) {
  double sane = value > 0 ? std::min(value, 1e9) : 0;
  return std::chrono::duration_cast<Duration>(std::chrono::duration<double>(sane));
}

class Deadline {
 public:
  static Deadline after(Duration duration) { return Deadline(Clock::now() + duration); }
  static Deadline never() { return Deadline(Clock::time_point::max()); }

  bool passed() const { return Clock::now() >= at_; }
  // Time that is left, never negative, and at most `slice`.
  Duration left(Duration slice) const {
    auto now = Clock::now();
    return now >= at_ ? Duration::zero() : std::min<Duration>(at_ - now, slice);
  }

 private:
  explicit Deadline(Clock::time_point at) : at_(at) {}
  Clock::time_point at_;
};

}  // namespace syncengine
