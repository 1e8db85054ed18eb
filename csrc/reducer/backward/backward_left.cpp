// Gradients that a rank has accumulated under no_sync, of parameters that have been frozen in each forward since that
// synchronizes: no bucket of the plan has them, and no other rank need know of them.
#include <memory>
#include <utility>

#include "reducer/backward/backward.h"
#include "reducer/torch/python_error.h"

namespace syncengine {

void Backward::announce_left() {
  left_anywhere_ = std::make_shared<std::vector<uint8_t>>(model_.parameters.size());
  for (size_t i : left_) (*left_anywhere_)[i] = 1;
  left_work_ = announce(left_anywhere_, model_.averaging.left_slot(), "accumulated gradients of ");
}

void Backward::learn_left() {
  if (masks_.left_by != 0) announce_left();
  if (left_work_) model_.averaging.communicator->wait(left_work_, raise_pending_signal);
}

bool Backward::begin_left() {
  std::vector<std::vector<size_t>> left;
  const Map anywhere = std::exchange(left_anywhere_, nullptr);
  for (size_t i = 0; anywhere && i < anywhere->size(); ++i) {
    if ((*anywhere)[i]) left.push_back({i});
  }
  if (left.empty()) {
    if (begins_left_) route_->install(*model_.plan);
    return false;
  }
  left_.clear();
  left_work_.reset();
  usage_work_.reset();
  asks_usage_ = asks_left_ = false;
  begins_left_ = true;
  masks_ = {};
  plan_ = std::make_shared<const BucketPlan>(left, model_.parameters.gradients(), model_.parameters.names(),
                                             /*provisional=*/false);
  route_->install(*plan_);
  if (model_.flat) model_.flat->begin();
  open_buckets();
  for (const auto& bucket : left) {
    if (is_absent_) {
      gradient(bucket[0]).collect_absent();
    } else {
      gradient(bucket[0]).collect_unused(model_.record.statistics);
    }
    count_collected(bucket[0]);
  }
  return true;
}

}  // namespace syncengine
