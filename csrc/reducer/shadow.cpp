// The Reducer of a rank that has no batch (Parallel.join): it takes part in the others' backward with zeros, and keeps its
// own gradients as they are.
#include "base/error.h"
#include "reducer/reducer.h"

namespace syncengine {

void Reducer::shadow_backward() {
  {
    std::lock_guard lock(mutex_);
    if (phase_ == Phase::Syncing || phase_ == Phase::Finalizing)
      throw Error(ErrorKind::InvalidUsage, unfinished_text());
    communicator_->throw_if_failed();
    used_here_.assign(used_here_.size(), false);
    begin_backward();
    for (size_t i = 0; i < planned_.size(); ++i) {
      if (!planned_[i]) continue;
      gradients_[i].collect_absent();
      ready_order_.push_back(i);  // as DDP: who was never asked gives the order of registration
      count_collected(i);
    }
    phase_ = Phase::Finalizing;
  }
  finalize();
}

void Reducer::expect_shadows() {
  std::lock_guard lock(mutex_);
  shadowed_ = true;
}

void Reducer::average_over(double divisor, double weight) {
  std::lock_guard lock(mutex_);
  divisor_ = divisor;
  weight_ = weight;
}

void Reducer::weigh(const Bucket& bucket) {
  at::NoGradGuard no_grad;
  for (size_t i : bucket.layout->parameters) gradients_[i].weigh(weight_);
}

}  // namespace syncengine
