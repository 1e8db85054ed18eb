// Who is late: each rank's own time in the last steps, compared. A rank tells its time of the step before with each
// step, in a word that travels with a bucket's flags, or, where no bucket has flags, with the last operation of a step;
// so all ranks know all times.
//
// Ownership, thread-safety: the holder's (StepTimes). Failure: none. Knows no torch.
#pragma once

#include <algorithm>
#include <array>
#include <bit>
#include <cstddef>
#include <cstdint>
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

  // Of one rank, over the window: medians in nanoseconds.
  struct Rank {
    int64_t late = 0;            // own time less the fastest rank's
    PhaseClock::Own by_phase{};  // of that
    // Steps in which it took over a tenth of a step longer than the middle rank: in the older half, in the newer half.
    // Behind the fastest are all but one of them, where times vary by chance.
    std::array<size_t, 2> often{};
  };

  // The stamps of all ranks, of one step. Of one in which fewer than two have any, nothing is compared.
  void add(std::vector<uint64_t> stamps) {
    if (std::count(stamps.begin(), stamps.end(), 0) + 2 > static_cast<ptrdiff_t>(stamps.size())) return;
    if (!steps_.empty() && steps_[0].size() != stamps.size()) steps_.clear();
    if (steps_.size() == kWindow) steps_.erase(steps_.begin());
    steps_.push_back(std::move(stamps));
  }
  size_t steps() const { return steps_.size(); }

  // `step`: how long one takes.
  std::vector<Rank> ranks(int64_t step) const {
    if (steps_.empty()) return {};
    std::vector<Rank> ranks(steps_[0].size());
    std::vector<std::array<std::vector<int64_t>, PhaseClock::kOwn + 1>> found(ranks.size());
    for (size_t k = 0; k < steps_.size(); ++k) {
      const auto total = [](const PhaseClock::Own& times) { return times[0] + times[1] + times[2] + times[3]; };
      std::vector<std::pair<int64_t, size_t>> totals;  // of the ranks that have a stamp
      std::vector<PhaseClock::Own> own(ranks.size());
      for (size_t rank = 0; rank < ranks.size(); ++rank) {
        own[rank] = unpack_stamp(steps_[k][rank]);
        if (steps_[k][rank] != 0) totals.emplace_back(total(own[rank]), rank);
      }
      std::sort(totals.begin(), totals.end());
      const int64_t middle = totals[(totals.size() - 1) / 2].first;
      const PhaseClock::Own fastest = own[totals[0].second];
      for (size_t rank = 0; rank < ranks.size(); ++rank)
        if (steps_[k][rank] == 0) own[rank] = fastest;  // without a batch: late for nobody
      for (size_t rank = 0; rank < ranks.size(); ++rank) {
        const int64_t late = total(own[rank]) - total(fastest);
        ranks[rank].often[k >= steps_.size() / 2] += (total(own[rank]) - middle) * 10 > step;
        for (size_t phase = 0; phase < PhaseClock::kOwn; ++phase)
          found[rank][phase].push_back(own[rank][phase] - fastest[phase]);
        found[rank].back().push_back(late);
      }
    }
    const auto median = [](std::vector<int64_t>& values) {
      const auto middle = values.begin() + static_cast<ptrdiff_t>(values.size() / 2);
      std::nth_element(values.begin(), middle, values.end());
      return *middle;
    };
    for (size_t rank = 0; rank < ranks.size(); ++rank) {
      ranks[rank].late = median(found[rank].back());
      for (size_t phase = 0; phase < PhaseClock::kOwn; ++phase)
        ranks[rank].by_phase[phase] = median(found[rank][phase]);
    }
    return ranks;
  }

 private:
  std::vector<std::vector<uint64_t>> steps_;  // the last ones, each by rank
};

}  // namespace syncengine
