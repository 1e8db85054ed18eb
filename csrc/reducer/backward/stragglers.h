// Each rank's own time in the last steps; syncengine/stragglers.py compares them. A rank tells its time of the step
// before with each step, in a word that travels with a bucket's flags, or, where no bucket has flags, with the last
// operation of a step; so all ranks know all times.
//
// Ownership, thread-safety: the holder's (StepTimes). Failure: none. Knows no torch.
#pragma once

#include <algorithm>
#include <array>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <iterator>
#include <utility>
#include <vector>

#include "base/phase_clock.h"

namespace syncengine {

// Four times in microseconds, 16 bits each: 11 of mantissa and 5 of exponent. 0 stands for no times.
inline uint64_t pack_stamp(const PhaseClock::Own& own) {
  uint64_t stamp = 0;
  for (size_t phase = 0; phase < own.size(); ++phase) {
    const uint64_t time = static_cast<uint64_t>(std::max<int64_t>(own[phase], 0)) / 1000;
    const int shift = std::clamp(static_cast<int>(std::bit_width(time)) - 11, 0, 31);
    stamp |= (std::min<uint64_t>(time >> shift, 0x7ff) | static_cast<uint64_t>(shift) << 11) << 16 * phase;
  }
  return stamp;
}

inline PhaseClock::Own unpack_stamp(uint64_t stamp) {
  PhaseClock::Own own{};
  for (size_t phase = 0; phase < own.size(); ++phase) {
    const uint64_t bits = stamp >> 16 * phase & 0xffff;
    own[phase] = static_cast<int64_t>((bits & 0x7ff) << (bits >> 11)) * 1000;
  }
  return own;
}

class Stragglers {
 public:
  static constexpr size_t kWindow = 100;  // steps

  // The stamps of all ranks, of one step. Of one in which fewer than two have any, nothing can be compared.
  void add(std::vector<uint64_t> stamps) {
    if (std::count(stamps.begin(), stamps.end(), 0) + 2 > static_cast<ptrdiff_t>(stamps.size())) return;
    if (steps_.size() == kWindow) steps_.erase(steps_.begin());
    steps_.push_back(std::move(stamps));
  }

  // Nanoseconds, of the last steps, by rank; zeros of one without a stamp.
  std::vector<std::vector<PhaseClock::Own>> own() const {
    std::vector<std::vector<PhaseClock::Own>> own;
    for (const auto& stamps : steps_) {
      own.emplace_back();
      std::transform(stamps.begin(), stamps.end(), std::back_inserter(own.back()), unpack_stamp);
    }
    return own;
  }

 private:
  std::vector<std::vector<uint64_t>> steps_;  // the last ones, each by rank
};

}  // namespace syncengine
