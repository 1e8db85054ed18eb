// The buckets of one backward, as their gradients come: which of them is whole, and whose turn it is.
//
// Ownership: the backward's; shares the plan. Thread-safety: the reducer's lock. Failure: none. A gradient costs two
// look-ups, and no allocation.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "steps/bucket_plan.h"

namespace syncengine {

class Filling {
 public:
  // `votes`: the last bucket that is not sparse is the vote, which is announced when this rank's backward has run.
  Filling(std::shared_ptr<const BucketPlan> plan, bool votes) : plan_(std::move(plan)) {
    buckets_.reserve(plan_->buckets().size());
    for (const auto& layout : plan_->buckets()) {
      if (votes && !layout->sparse) vote_ = buckets_.size();
      buckets_.push_back({.missing = static_cast<uint32_t>(layout->parameters.size())});
    }
    missing_ = buckets_.size();
  }

  struct Counted {
    size_t bucket;
    bool first, full;  // it is the first gradient of its bucket; the last one
  };
  // The gradient of a parameter that the plan covers has come, or what stands in for it.
  Counted count(size_t parameter) {
    const size_t at = plan_->bucket_of(parameter);
    Bucket& bucket = buckets_[at];
    const bool first = std::exchange(bucket.begun, true) == false;
    return {at, first, --bucket.missing == 0};
  }
  // A bucket is full, and nobody has a gradient in it, if it is `skipped`. Returns whether it goes its way now: the
  // vote waits for the end.
  bool filled(size_t bucket, bool skipped) {
    --missing_;
    buckets_[bucket].state = skipped ? State::Skipped : State::Ready;
    return vote_ != bucket;
  }
  // It was announced to the peers, or handed to the communication hook.
  void went(size_t bucket) { buckets_[bucket].state = State::Gone; }

  bool is_ready(size_t bucket) const { return buckets_[bucket].state == State::Ready; }
  bool is_skipped(size_t bucket) const { return buckets_[bucket].state == State::Skipped; }
  bool has_gone(size_t bucket) const { return buckets_[bucket].state == State::Gone; }
  bool all() const { return missing_ == 0; }
  std::optional<size_t> vote() const { return vote_; }

  // Buckets in their order, the same on all ranks, each as soon as it and all before it are full; none: not yet.
  std::optional<size_t> next_in_order() {
    const bool full = next_ < buckets_.size() && buckets_[next_].state != State::Filling;
    return full ? std::optional(next_++) : std::nullopt;
  }

 private:
  enum class State : uint8_t { Filling, Ready, Gone, Skipped };
  struct Bucket {
    uint32_t missing;  // gradients that this backward has not brought yet
    bool begun = false;
    State state = State::Filling;
  };

  std::shared_ptr<const BucketPlan> plan_;
  std::vector<Bucket> buckets_;
  size_t missing_ = 0;  // buckets that are not full
  size_t next_ = 0;     // bucket that next_in_order() comes to
  std::optional<size_t> vote_;
};

}  // namespace syncengine
