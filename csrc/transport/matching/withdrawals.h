// Ranges of tags that were withdrawn here, and those that the peer has withdrawn: what still comes for them is dropped.
//
// A range is forgotten once both sides have withdrawn it and all that the peer had sent unasked before has come. So
// only those are kept that one side still uses. Ranges are equal or disjoint. Thread-safety: under the endpoint's
// progress lock.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>

#include "transport/matching/frame.h"
#include "transport/matching/shared.h"

namespace syncengine::matching {

class Withdrawals {
 public:
  Withdrawals(const Shared& shared, int peer) : shared_(shared), peer_(peer) {}

  bool is_withdrawn(uint64_t tag) const;
  void withdraw(uint64_t first, uint64_t last);
  void hear(const Frame& frame);  // the peer's Withdrawn
  void count_eager();             // one more of the peer's has come whole
  size_t size() const { return ranges_.size(); }

 private:
  struct Range {
    uint64_t last = 0;
    bool here = false, there = false;
    uint32_t eagers = 0;  // that the peer had sent, if `there`
  };
  bool is_over(const Range& range) const;

  const Shared& shared_;
  int peer_;
  uint32_t eagers_ = 0;               // that have come; only differences matter
  std::map<uint64_t, Range> ranges_;  // by first tag
  size_t awaited_ = 0;                // of them: withdrawn on both sides, with Eagers still to come
};

}  // namespace syncengine::matching
