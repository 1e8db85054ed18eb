#include "reducer/backward/model.h"

#include <string>
#include <utility>

#include "base/error.h"
#include "reducer/backward/backward.h"
#include "reducer/torch/python_error.h"

namespace syncengine {

Model::Model(std::vector<at::Tensor> tensors, ModelNames names, const std::shared_ptr<Communicator>& communicator,
             const std::vector<bool>& sparse, const ReducerOptions& asked, std::unique_ptr<BucketLane> lane)
    : options(asked),
      averaging{.communicator = communicator,
                .parameters = tensors.size(),
                .scaling = scaling_of(asked, communicator->numerics()),
                .scales_first = communicator->numerics() == Numerics::Ring},
      parameters(std::move(tensors), std::move(names), sparse),
      usage(parameters.size(), options.find_unused_parameters, options.static_graph),
      flat(lane ? std::make_unique<FlatBuckets>(std::move(lane)) : nullptr),
      pooled(options.gradients_in_arena ? communicator->gradient_pool() : nullptr),
      route(flat ? make_flat_route(*this) : make_in_place_route(*this)),
      outcome(averaging, life) {
  parameters.keep_trained(usage.finds_unused());
  keep_gradients();
}

Forward& Model::coming_forward() {
  if (!forward) {
    forward = std::make_shared<Forward>();
    forward->weighting.divisor = averaging.communicator->size();
  }
  return *forward;
}

Backward& Model::coming_backward() {
  if (!backward) backward = std::make_shared<Backward>(*this);
  return *backward;
}

bool Model::end_step() {
  const bool completed = step && step->begun;
  step.reset();
  if (!completed) usage.clear();
  return completed;
}

uint64_t Model::reserve_slots(std::optional<uint64_t> copy_of) {
  if (averaging.slots) return averaging.slots->first();
  auto describe = [model = parameters.model(), copy_of] {
    const std::string text = "reserving the buckets of " + model;
    return copy_of ? text + ", a copy of the one with number " + std::to_string(*copy_of) : text;
  };
  averaging.slots = averaging.communicator->reserve_slots(averaging.parameters + 3, describe, raise_pending_signal);
  return averaging.slots->first();
}

void Model::check_between_backwards(const char* what) const {
  if (!backward || !backward->has_begun()) return;
  throw Error(ErrorKind::InvalidUsage, parameters.model() + ": " + what + " in the middle of a backward");
}

bool Model::wants_plan(bool changed) {
  const bool wanted = plan.is_wanted();
  if (!plan.is_outdated(changed, parameters)) return false;
  if (!wanted && plan) keep_gradients();
  return true;
}

// DDP makes buckets at wrapping and when it makes them anew, and moves existing gradients into them.
void Model::keep_gradients() {
  if (averaging.scaling != Scaling::DivideViewed) return;
  for (Gradient& gradient : parameters.gradients()) gradient.keep();
}

void Model::install_plan(const std::vector<std::vector<size_t>>& buckets, bool provisional) {
  check_between_backwards("the buckets can't change");
  if (!averaging.slots) {
    throw Error(ErrorKind::InvalidUsage, parameters.model() + ": reserve_slots() comes before the first plan");
  }
  install(std::make_shared<const BucketPlan>(buckets, parameters.facts(), parameters.names(), provisional));
  parameters.note_trained(*plan);
}

void Model::install(std::shared_ptr<const BucketPlan> of_another_forward) {
  plan.install(std::move(of_another_forward));
  pooled.install(*plan);
  route->install();
}

void Model::check_hookable() {
  check_between_backwards("hooks can't be registered");
  if (has_hook_) {
    throw Error(ErrorKind::InvalidUsage, "register_comm_hook or register_builtin_comm_hook can only be called once.");
  }
}

void Model::set_comm_hook(std::unique_ptr<c10d::CommHookInterface> hook) {
  check_hookable();
  route = make_comm_hook_route(*this, std::move(hook));
  if (plan) route->install();
  has_hook_ = true;
}

void Model::set_compression(at::ScalarType type, bool divides_first) {
  const std::string name = c10::toString(type);
  if (type != at::kHalf && type != at::kBFloat16) {
    throw Error(ErrorKind::InvalidUsage, "gradients can be compressed to float16 or bfloat16, not to " + name);
  }
  check_hookable();
  for (size_t i = 0; i < parameters.size(); ++i) {
    if (!parameters.tensor(i).is_complex()) continue;
    throw Error(ErrorKind::InvalidUsage, "the gradient of " + parameters.name(i) +
                                             " is complex: it can't be compressed to " + name +
                                             "; use no compressing hook with this model");
  }
  averaging.travels_as = type;
  if (plan) route->install();
  if (divides_first) {
    averaging.scales_first = true;
    averaging.scaling = scaling_of({.batched_grad_copy = true}, averaging.communicator->numerics());
  }
  has_hook_ = true;
}

void Model::set_all_reduce_hook() {
  check_hookable();
  averaging.scaling = scaling_of({.batched_grad_copy = true}, averaging.communicator->numerics());
  has_hook_ = true;
}

void Model::set_static_graph() {
  if (record.statistics.backwards > 0) {
    throw Error(ErrorKind::InvalidUsage,
                "set_static_graph() should be called before training loop starts and after DistributedDataParallel is "
                "constructed.");
  }
  usage.set_static_graph();
  parameters.keep_trained(false);  // it finds its unused ones once
}

std::shared_ptr<Work> Model::announce(size_t slot, std::shared_ptr<std::vector<uint8_t>> bytes,
                                      const char* what) const {
  Operation operation{.dtype = DType::UInt8, .op = ReduceOp::Max, .numerics = averaging.communicator->numerics()};
  operation.output.add(reinterpret_cast<std::byte*>(bytes->data()), bytes->size());
  operation.input = operation.output;
  operation.describe = [names = parameters.names(), what] { return what + std::string(" of ") + names->model; };
  operation.keepalive = std::move(bytes);
  return averaging.communicator->announce(averaging.slots, slot, life.step(), std::move(operation));
}

std::shared_ptr<Work> Model::vote(std::shared_ptr<std::vector<uint8_t>> bytes) const {
  return announce(averaging.vote_slot(), std::move(bytes), "the last of a step");
}

void Model::let_go_of_gradients(bool keeps) {
  for (size_t i = 0; i < parameters.size(); ++i) {
    if (!plan.covers(i)) continue;
    Gradient& gradient = parameters.gradients()[i];
    keeps ? gradient.forget() : gradient.discard();
  }
  if (!keeps) usage.clear();
}

void Model::pool_gradients() {
  if (!plan || plan.all_frozen()) return;
  pooled.use_in_this_task(parameters.tensor(plan->buckets()[0]->parameters[0]).grad().defined());
}

}  // namespace syncengine
