// The plan of which gradients are reduced together: a pure function of indices and of facts about the parameters.
//
// Ownership: shared by the model and by the backward that runs by it. Immutable, so any thread may read it. Failure:
// the constructor throws Error(InvalidUsage) if an index is out of range or occurs twice, or if a bucket is empty or of
// several dtypes.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <unordered_set>
#include <utility>
#include <vector>

#include "base/dtype.h"
#include "steps/texts.h"

namespace syncengine {

// The size and the dtype that a parameter has at the moment.
struct Footprint {
  size_t bytes = 0;
  int type = -1;  // its dtype, by torch's number
  bool operator==(const Footprint&) const = default;
};
struct Fact {
  Footprint footprint;
  std::optional<DType> dtype;  // in which its gradients are reduced; none: they can't be
  std::string type_name = {};
  uint64_t order = 0;   // a hash of the order of its elements, 0 for the usual one
  bool sparse = false;  // its gradients are of sparse layout
};

// The offsets of a bucket's small gradients, of less than a page, in the one block that the bucket has for them.
struct SmallLayout {
  static constexpr size_t kLarge = ~size_t{0};
  std::vector<size_t> offsets;  // for each parameter of the layout; kLarge: its gradient lies elsewhere
  size_t bytes = 0;
};

// The facts about a bucket that its plan fixes. Operations hold them, too, to name the bucket in texts.
struct BucketLayout {
  std::shared_ptr<const ModelNames> names;
  size_t index;
  DType dtype;
  std::vector<size_t> parameters;  // in the order in which they lie in the concatenation
  bool sparse;                     // of one gradient of sparse layout
  SmallLayout small;
  uint64_t hash;  // of indices, sizes and dtype: equal on all ranks, or the reduction is a Mismatch

  // Names the bucket: "bucket 3 of Parallel(GPT) (layer.weight, layer.bias, ...)".
  std::string describe() const;
};

class BucketPlan {
 public:
  // Makes one bucket of each list of parameter indices. A `provisional` plan is replaced as soon as the order is known
  // in which gradients become ready.
  BucketPlan(const std::vector<std::vector<size_t>>& indices, const std::vector<Fact>& facts,
             const std::shared_ptr<const ModelNames>& names, bool provisional);

  const std::vector<std::shared_ptr<const BucketLayout>>& buckets() const { return buckets_; }
  bool provisional() const { return provisional_; }

  bool covers(size_t parameter) const { return places_[parameter].bucket != kNone; }
  const std::vector<size_t>& covered() const { return covered_; }  // in order
  // The bucket of a parameter that the plan covers, and the parameter's position in that bucket.
  size_t bucket_of(size_t parameter) const { return places_[parameter].bucket; }
  size_t position_of(size_t parameter) const { return places_[parameter].position; }

  // Whether a covered parameter has the size and the dtype that it had when the plan was made.
  bool fits(size_t parameter, const Footprint& now) const { return places_[parameter].footprint == now; }

  // Whether this plan covers, in present size and dtype, all of `other` that require gradients, and so can replace it.
  bool contains(const BucketPlan& other, auto&& sees) const {
    return std::all_of(other.covered_.begin(), other.covered_.end(),
                       [&](size_t i) { return !sees.is_trained(i) || (covers(i) && fits(i, sees.footprint(i))); });
  }

  // Parameters in buckets of sparse layout, in order.
  const std::vector<size_t>& sparse() const { return sparse_; }
  // The sizes, in bytes, of the gradients that the pool may hold: dense ones of at least a page.
  const std::unordered_set<size_t>& pooled_sizes() const { return pooled_sizes_; }

 private:
  static constexpr uint32_t kNone = ~uint32_t{0};
  struct Place {
    uint32_t bucket = kNone, position = 0;
    Footprint footprint = {};
  };

  std::vector<std::shared_ptr<const BucketLayout>> buckets_;
  bool provisional_;
  std::vector<Place> places_;  // by parameter
  std::vector<size_t> covered_, sparse_;
  std::unordered_set<size_t> pooled_sizes_;
};

// The bucket plan that a model has, shared with its backward, and whether it fits the parameters as they are now.
//
// Ownership: the model's. Thread-safety: the reducer's lock. Failure: none.
class CurrentPlan {
 public:
  explicit operator bool() const { return plan_ != nullptr; }
  const BucketPlan& operator*() const { return *plan_; }
  const BucketPlan* operator->() const { return plan_.get(); }
  const std::shared_ptr<const BucketPlan>& shared() const { return plan_; }
  bool covers(size_t parameter) const { return plan_ && plan_->covers(parameter); }
  bool all_frozen() const { return plan_ && plan_->buckets().empty(); }

  // While all parameters are frozen: the last plan before, for gradients of older graphs; null if there was none.
  const std::shared_ptr<const BucketPlan>& before_frozen() const { return before_frozen_; }

  void install(std::shared_ptr<const BucketPlan> plan) {
    if (!plan->buckets().empty()) {
      before_frozen_.reset();
    } else if (plan_ && !plan_->buckets().empty()) {
      before_frozen_ = std::move(plan_);
    }
    plan_ = std::move(plan);
    used_ = noticed_ = false;
    covers_.reset();
  }
  // Notes the end of a step by this plan. `shows_order`: whether its gradients came in the order of later steps.
  void use(bool shows_order) {
    used_ = shows_order;
    noticed_ = false;
  }

  // Whether another plan must be installed before the next backward: the parameters are not those that this plan
  // covers, or the plan is provisional and the order in which gradients become ready is now known. `changed`: some
  // parameter has changed since the last call.
  bool is_outdated(bool changed, auto&& sees) {
    if (changed || !covers_) covers_ = plan_ && sees.are_covered_by(*plan_);
    return !*covers_ || knows_order();
  }
  // Whether the plan is provisional, and the order in which gradients become ready is known. The same on all ranks.
  bool knows_order() const { return plan_ && plan_->provisional() && used_; }
  // Whether the order is known, once for each time that it becomes known.
  bool notices_order() { return knows_order() && !std::exchange(noticed_, true); }

 private:
  std::shared_ptr<const BucketPlan> plan_, before_frozen_;
  bool used_ = false;           // a backward has shown the order since it was installed
  bool noticed_ = false;        // and notices_order() has said so
  std::optional<bool> covers_;  // the parameters as they are now; none: not known yet
};

// The buckets of one backward, as their gradients come: which of them is whole, and whose turn it is.
//
// Ownership: the backward's; shares the plan. Thread-safety: the reducer's lock. Failure: none. A gradient costs two
// look-ups, and no allocation.
class Filling {
 public:
  // With `votes`, the last bucket that is not sparse is the vote. It is announced when this rank's backward has run; if
  // it is reduced, all ranks get the averages of the step.
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
    bool first, full;  // it was the first gradient of its bucket; the last one
  };
  // Notes that the gradient of a covered parameter has come, or a substitute for it.
  Counted count(size_t parameter) {
    const size_t at = plan_->bucket_of(parameter);
    Fill& bucket = buckets_[at];
    const bool first = std::exchange(bucket.begun, true) == false;
    return {at, first, --bucket.missing == 0};
  }
  // Notes that a bucket is full, or `skipped` because no rank has a gradient in it. Returns whether the route gets it
  // now: the vote waits for the end of this rank's backward.
  bool filled(size_t bucket, bool skipped) {
    --missing_;
    buckets_[bucket].state = skipped ? State::Skipped : State::Ready;
    return vote_ != bucket;
  }
  // Notes that a bucket was announced to the peers, or handed to the communication hook.
  void went(size_t bucket) { buckets_[bucket].state = State::Gone; }

  bool is_ready(size_t bucket) const { return buckets_[bucket].state == State::Ready; }
  bool is_skipped(size_t bucket) const { return buckets_[bucket].state == State::Skipped; }
  bool has_gone(size_t bucket) const { return buckets_[bucket].state == State::Gone; }
  bool all() const { return missing_ == 0; }
  std::optional<size_t> vote() const { return vote_; }

  // Returns the next bucket in the plan's order, which is the same on all ranks, once it and all before it are full.
  std::optional<size_t> next_in_order() {
    const bool full = next_ < buckets_.size() && buckets_[next_].state != State::Filling;
    return full ? std::optional(next_++) : std::nullopt;
  }

 private:
  enum class State : uint8_t { Filling, Ready, Gone, Skipped };
  struct Fill {
    uint32_t missing;  // gradients that this backward has not brought yet
    bool begun = false;
    State state = State::Filling;
  };

  std::shared_ptr<const BucketPlan> plan_;
  std::vector<Fill> buckets_;
  size_t missing_ = 0;  // buckets that are not full
  size_t next_ = 0;     // bucket that next_in_order() comes to
  std::optional<size_t> vote_;
};

}  // namespace syncengine
