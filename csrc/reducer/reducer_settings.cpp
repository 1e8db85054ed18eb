// The Reducer's settings, between the events of forward and backward.
#include "base/error.h"
#include "reducer/backward/backward.h"
#include "reducer/reducer.h"

namespace syncengine {

void Reducer::check_between_backwards(const char* what) const {
  if (!model_->backward || !model_->backward->has_begun()) return;
  throw Error(ErrorKind::InvalidUsage, names().model + ": " + what + " in the middle of a backward");
}

uint64_t Reducer::reserve_slots(std::optional<uint64_t> copy_of) {
  Averaging& averaging = model_->averaging;
  if (averaging.slots) return averaging.slots->first();
  auto describe = [model = names().model, copy_of] {
    const std::string text = "reserving the buckets of " + model;
    return copy_of ? text + ", a copy of the one with number " + std::to_string(*copy_of) : text;
  };
  averaging.slots = averaging.communicator->reserve_slots(averaging.parameters + 3, describe, raise_pending_signal);
  return averaging.slots->first();
}

void Reducer::install_plan(const std::vector<std::vector<size_t>>& buckets, bool provisional) {
  std::lock_guard lock(mutex_);
  Parameters& parameters = model_->parameters;
  check_between_backwards("the buckets can't change");
  if (!model_->averaging.slots) {
    throw Error(ErrorKind::InvalidUsage, names().model + ": reserve_slots() comes before the first plan");
  }
  model_->install(std::make_shared<const BucketPlan>(buckets, parameters.facts(), parameters.names(), provisional));
  parameters.note_trained(*model_->plan);
}

void Reducer::check_hookable() const {
  check_between_backwards("hooks can't be registered");
  if (has_hook_) {
    throw Error(ErrorKind::InvalidUsage, "register_comm_hook or register_builtin_comm_hook can only be called once.");
  }
}

void Reducer::set_comm_hook(std::unique_ptr<c10d::CommHookInterface> hook) {
  std::lock_guard lock(mutex_);
  check_hookable();
  model_->route = make_comm_hook_route(model_->for_route(), std::move(hook));
  if (model_->plan) model_->route->install(*model_->plan);
  has_hook_ = true;
}

void Reducer::set_compression(at::ScalarType type, bool divides_first) {
  std::lock_guard lock(mutex_);
  const std::string name = c10::toString(type);
  if (type != at::kHalf && type != at::kBFloat16) {
    throw Error(ErrorKind::InvalidUsage, "gradients can be compressed to float16 or bfloat16, not to " + name);
  }
  check_hookable();
  for (size_t i = 0; i < model_->parameters.size(); ++i) {
    if (!model_->parameters.tensor(i).is_complex()) continue;
    throw Error(ErrorKind::InvalidUsage, "the gradient of " + names().parameters[i] +
                                             " is complex: it can't be compressed to " + name +
                                             "; use no compressing hook with this model");
  }
  Averaging& averaging = model_->averaging;
  averaging.travels_as = type;
  if (model_->plan) model_->route->install(*model_->plan);
  if (divides_first) {
    averaging.scales_first = true;
    averaging.scaling = scaling_of({.batched_grad_copy = true}, averaging.communicator->numerics());
  }
  has_hook_ = true;
}

void Reducer::set_all_reduce_hook() {
  std::lock_guard lock(mutex_);
  check_hookable();
  Averaging& averaging = model_->averaging;
  averaging.scaling = scaling_of({.batched_grad_copy = true}, averaging.communicator->numerics());
  has_hook_ = true;
}

void Reducer::set_static_graph() {
  std::lock_guard lock(mutex_);
  if (model_->record.statistics.backwards > 0) {
    throw Error(ErrorKind::InvalidUsage,
                "set_static_graph() should be called before training loop starts and after DistributedDataParallel is "
                "constructed.");
  }
  model_->usage.set_static_graph();
  model_->parameters.keep_trained(false);  // a static graph's unused parameters are found once
}

void Reducer::install_futures(const std::vector<TorchFuture>& futures) {
  std::lock_guard lock(mutex_);
  auto& all = model_->coming_backward().futures;
  all.insert(all.end(), futures.begin(), futures.end());
}

}  // namespace syncengine
