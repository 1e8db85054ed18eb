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
    if (options_.skip_all_reduce_unused_params) throw_cant_shadow("skip_all_reduce_unused_params=True");
    if (static_graph_ && !static_graph_->observed()) throw_cant_shadow("static_graph=True before its first batch");
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

// It does not know what the others leave out.
void Reducer::throw_cant_shadow(const std::string& option) const {
  std::string text = names_->model + ": a rank without a batch can't follow the others in join() with " + option;
  tell_peers(text);
  throw Error(ErrorKind::InvalidUsage, text);
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
