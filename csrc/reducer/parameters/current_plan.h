// The bucket plan that a model has, and whether it still does for the parameters as they are now.
//
// Ownership: the model's; a backward shares the plan that it goes by. Thread-safety: the reducer's lock.
#pragma once

#include <cstddef>
#include <memory>
#include <utility>

#include "reducer/buckets/bucket_plan.h"
#include "reducer/parameters/parameters.h"

namespace syncengine {

class CurrentPlan {
 public:
  // None until the first one is installed.
  explicit operator bool() const { return plan_ != nullptr; }
  const BucketPlan& operator*() const { return *plan_; }
  const BucketPlan* operator->() const { return plan_.get(); }
  const std::shared_ptr<const BucketPlan>& shared() const { return plan_; }
  bool covers(size_t parameter) const { return plan_ && plan_->covers(parameter); }

  // The last one for which not all parameters were frozen, while they are; null if there was none.
  const std::shared_ptr<const BucketPlan>& before_frozen() const { return before_frozen_; }

  void install(std::shared_ptr<const BucketPlan> plan) {
    if (!plan->buckets().empty()) {
      before_frozen_.reset();
    } else if (plan_ && !plan_->buckets().empty()) {
      before_frozen_ = std::move(plan_);
    }
    plan_ = std::move(plan);
    used_ = wanted_ = is_known_ = false;
  }
  // A backward begins. `shows_order`: it brings gradients in the order in which later ones will.
  std::shared_ptr<const BucketPlan> use(bool shows_order) {
    used_ = shows_order;
    return plan_;
  }

  // Whether another one is to be installed before the next backward: these parameters are not those that it covers, or
  // it was provisional and the order in which gradients are ready is now known. `changed`: they have, since last asked.
  bool is_outdated(const Parameters& parameters, bool changed) {
    if (changed || !is_known_) covers_ = plan_ && parameters.are_covered_by(*plan_);
    is_known_ = true;
    wanted_ = !covers_ || knows_order();
    return wanted_;
  }
  // The same on all ranks: whether it was provisional, and the order is known now.
  bool knows_order() const { return plan_ && plan_->provisional() && used_; }
  // Whether that was so when it was last asked.
  bool is_wanted() const { return wanted_; }

 private:
  std::shared_ptr<const BucketPlan> plan_, before_frozen_;
  bool used_ = false;      // there was a backward since it was installed
  bool wanted_ = false;    // another one
  bool is_known_ = false;  // whether it covers the parameters, as they are now:
  bool covers_ = false;
};

}  // namespace syncengine
