// The Reducer's forward, and what is asked of it between steps.
#include "reducer/reducer.h"

#include <algorithm>
#include <utility>

#include "base/error.h"
#include "reducer/flat_route.h"
#include "reducer/in_place_route.h"
#include "reducer/peers.h"
#include "reducer/python_error.h"

namespace syncengine {

Reducer::Reducer(std::vector<at::Tensor> parameters, ModelNames names, std::shared_ptr<Communicator> communicator,
                 const std::vector<bool>& sparse, const ReducerOptions& options, std::unique_ptr<BucketLane> lane)
    : options_(options),
      averaging_{.communicator = communicator,
                 .parameters = parameters.size(),
                 .scaling = scaling_of(options, communicator->numerics())},
      parameters_(std::move(parameters), std::move(names), sparse),
      usage_(parameters_.size()),
      flat_(lane ? std::make_unique<FlatBuckets>(std::move(lane)) : nullptr),
      pooled_(options.gradients_in_arena ? communicator->gradient_pool() : nullptr) {
  if (options.static_graph) static_graph_ = std::make_unique<StaticGraph>(parameters_.size());
  if (flat_) {
    route_ = std::make_unique<FlatRoute>(*flat_, averaging_, parameters_.gradients());
  } else {
    route_ = std::make_unique<InPlaceRoute>(pooled_);
  }
}

Reducer::~Reducer() {
  std::lock_guard lock(mutex_);
  try {
    if (phase_ == Phase::Syncing) {
      give_up({parameters_.model() + " was destroyed before its backward had brought all gradients", true});
    }
  } catch (...) {
    // The peers hear of it by their deadline.
  }
  parameters_.unhook(*this);
}

bool Reducer::begin_forward(bool synchronize) {
  std::unique_lock lock(mutex_);
  if (recomputing()) return false;
  tasks_.wait_for_all(lock);
  if (!unusable_ && phase_ == Phase::Syncing) give_up({unfinished_text(), true});
  if (unusable_) throw Error(ErrorKind::InvalidUsage, *unusable_);
  if (hooks_removed_ && !synchronize) return false;
  if (synchronize) await_given_up(lock);
  if (hooks_removed_) {
    give_up({removed_text(), true}, /*keeps_gradients=*/true);
    throw Error(ErrorKind::InvalidUsage, *unusable_);
  }
  averaging_.communicator->throw_if_failed();
  forward_.reset();
  claimed_ = false;
  if (phase_ == Phase::Consumed && !synchronize) phase_ = Phase::Local;
  if (synchronize) averaging_.timeline.begin_forward(averaging_.statistics.backwards);
  if (flat_) follow_stream();
  if (parameters_.follow(shared_from_this())) plan_is_known_ = false;
  bool wanted_plan = std::exchange(wants_plan_, plan_is_outdated());
  if (wants_plan_ && !wanted_plan && averaging_.scaling == Scaling::DivideViewed) {
    for (Gradient& gradient : parameters_.gradients()) gradient.keep();  // here DDP makes buckets, and moves them there
  }
  return wants_plan_;
}

// Its slots are free for another backward when every rank has taken part.
void Reducer::await_given_up(std::unique_lock<std::mutex>& lock) {
  if (!given_up_) return;
  auto [left, reason, reasons, reused] = *std::exchange(given_up_, std::nullopt);
  lock.unlock();
  for (const auto& work : left.works) averaging_.communicator->wait(work, raise_pending_signal);
  const bool any_told = left.abandoned_by() != 0;  // so all have heard of it, and say why, or that they wait
  std::optional<Reason> gravest;
  if (any_told) gravest = reasons.wait();
  if (!any_told && reused && left.dropped_by() == everybody()) {
    reasons.wait();  // the exchange was about the backward before, and all others have taken it so
    reasons = Reasons(averaging_, parameters_.model(), reason);
  }
  lock.lock();
  averaging_.communicator->set_last_words("", {});
  if (!any_told) {
    unread_ = std::move(reasons);
    dropped_last_ = true;
  } else if (gravest->for_good) {
    unusable_ = gravest->text;
    throw Error(ErrorKind::Aborted, *unusable_);
  }
}

bool Reducer::plan_is_outdated() {
  if (!std::exchange(plan_is_known_, true)) plan_covers_ = plan_ && parameters_.are_covered_by(*plan_);
  return !plan_covers_ || (plan_->provisional() && plan_used_);
}

// An AccumulateGrad node runs on the stream that was current when it was made, and a graph can't be captured through
// one of another stream that is the default one. So all are made anew where nobody else holds them.
void Reducer::follow_stream() {
  const c10::Stream stream = flat_->current();
  if (std::exchange(hooked_on_, stream) != stream) parameters_.let_go_of_nodes();
}

Forward& Reducer::coming_forward() {
  if (!forward_) {
    forward_ = std::make_shared<Forward>();
    forward_->weighting.divisor = averaging_.communicator->size();
  }
  return *forward_;
}

Backward& Reducer::coming_backward() {
  if (!backward_) {
    backward_ = std::make_shared<Backward>(Backward::Model{
        .parameters = parameters_, .averaging = averaging_, .usage = usage_, .options = options_, .flat = flat_.get()});
  }
  return *backward_;
}

std::vector<at::Tensor> Reducer::prepare_for_backward(const std::vector<at::Tensor>& outputs) {
  std::lock_guard lock(mutex_);
  if (recomputing()) return {};
  Forward& forward = coming_forward();
  std::vector<at::Tensor> other_leaves;
  if (finds_unused() || observes()) other_leaves = mark_reachable(outputs, forward);
  if (brought_nothing_) check_parameters_take_part(outputs);
  for (const auto& output : outputs) {
    if (const auto* node = hook_output(weak_from_this(), output, forward_)) forward.outputs.push_back(node);
  }
  outputs_hooked_ = !forward.outputs.empty();
  coming_backward().expect(std::exchange(forward_, nullptr));
  phase_ = Phase::Armed;
  return other_leaves;
}

// See prepare_for_backward.
std::vector<at::Tensor> Reducer::mark_reachable(const std::vector<at::Tensor>& outputs, Forward& forward) {
  forward.reachable.assign(parameters_.size(), false);
  auto others = mark_used(outputs, parameters_.accumulators(), forward.reachable);
  if (others.empty()) return {};
  for (size_t i = 0; i < parameters_.size(); ++i) {
    if (is_planned(i) && !forward.reachable[i]) return leaves_of(others);
  }
  return {};
}

// A module whose parameters were replaced would train without ever being synchronized.
void Reducer::check_parameters_take_part(const std::vector<at::Tensor>& outputs) {
  auto requires_grad = [](const at::Tensor& output) { return output.requires_grad(); };
  if (parameters_.accumulators().empty() || std::none_of(outputs.begin(), outputs.end(), requires_grad)) return;
  std::vector<bool> reached(parameters_.size());
  mark_used(outputs, parameters_.accumulators(), reached);
  if (std::find(reached.begin(), reached.end(), true) != reached.end()) return;
  std::string text = "the outputs of " + parameters_.model() +
                     " depend on none of the parameters that it was made with, so nothing would be synchronized. "
                     "Were they replaced, say by load_state_dict(assign=True)? Then wrap the module again";
  give_up({text, true}, /*keeps_gradients=*/true);
  throw Error(ErrorKind::InvalidUsage, text);
}

void Reducer::prepare_for_local_backward(const std::vector<at::Tensor>& outputs) {
  if (!pooled_.pool() && !watches_local_backwards_) return;
  for (const auto& output : outputs) hook_output(weak_from_this(), output, nullptr);
}

// Checkpointing runs forward again in the middle of backward, which then fails itself.
void Reducer::abandon_forward(const std::string& text) {
  std::lock_guard lock(mutex_);
  if (phase_ == Phase::Syncing || phase_ == Phase::Finalizing || !plan_) return;
  give_up({text, false}, /*keeps_gradients=*/true);
}

uint64_t Reducer::reserve_slots(std::optional<uint64_t> copy_of) {
  if (averaging_.slots) return averaging_.slots->first();
  auto describe = [names = parameters_.names(), copy_of] {
    std::string text = "reserving the buckets of " + names->model;
    return copy_of ? text + ", a copy of the one with number " + std::to_string(*copy_of) : text;
  };
  auto slots = averaging_.communicator->reserve_slots(averaging_.slots_needed(), describe, raise_pending_signal);
  std::lock_guard lock(mutex_);
  averaging_.slots = std::move(slots);
  return averaging_.slots->first();
}

void Reducer::install_plan(const std::vector<std::vector<size_t>>& buckets, bool provisional) {
  std::lock_guard lock(mutex_);
  if (phase_ == Phase::Syncing || phase_ == Phase::Finalizing) {
    throw Error(ErrorKind::InvalidUsage,
                parameters_.model() + ": the buckets can't change in the middle of a backward");
  }
  if (!averaging_.slots) {
    throw Error(ErrorKind::InvalidUsage, parameters_.model() + ": reserve_slots() comes before the first plan");
  }
  plan_ = std::make_shared<const BucketPlan>(buckets, parameters_.gradients(), parameters_.names(), provisional);
  pooled_.install(*plan_);
  route_->install(*plan_);
  plan_used_ = plan_is_known_ = wants_plan_ = false;
  averaging_.ready_order.reserve(parameters_.size());
}

std::vector<size_t> Reducer::ready_order() const {
  std::lock_guard lock(mutex_);
  return averaging_.ready_order;
}

Timeline Reducer::timeline() const {
  std::lock_guard lock(mutex_);
  return averaging_.timeline;
}

void Reducer::set_sample_rate(uint64_t rate) {
  std::lock_guard lock(mutex_);
  averaging_.timeline.set_sample_rate(rate);
}

Statistics Reducer::statistics() const {
  std::lock_guard lock(mutex_);
  Statistics statistics = averaging_.statistics;
  if (pooled_.pool()) statistics.shortage = pooled_.pool()->shortage();
  return statistics;
}

bool Reducer::graph_is_static() const {
  std::lock_guard lock(mutex_);
  return graph_is_static_;
}

void Reducer::watch_local_backwards() {
  std::lock_guard lock(mutex_);
  watches_local_backwards_ = true;
}

std::string Reducer::not_averaged() const {
  std::lock_guard lock(mutex_);
  return not_averaged_;
}

std::string Reducer::last_error() const {
  std::lock_guard lock(mutex_);
  return last_error_;
}

void Reducer::check_finalized() const {
  std::lock_guard lock(mutex_);
  if (phase_ == Phase::Syncing) throw Error(ErrorKind::InvalidUsage, unfinished_text());
}

void Reducer::set_comm_hook(std::unique_ptr<c10d::CommHookInterface> hook) {
  std::lock_guard lock(mutex_);
  check_no_hook();
  use_route(std::make_unique<CommHookRoute>(std::move(hook), flat_.get()));
  has_hook_ = true;
}

void Reducer::use_route(std::unique_ptr<Route> route) {
  route_ = std::move(route);
  if (plan_) route_->install(*plan_);
}

void Reducer::set_compression(Compression compression) {
  std::lock_guard lock(mutex_);
  check_no_hook();
  for (size_t i = 0; i < parameters_.size(); ++i) compression.check(parameters_.tensor(i), parameters_.name(i));
  averaging_.compression = compression;
  if (plan_) route_->install(*plan_);
  // torch's own hooks divide; see Scaling.
  if (compression.divides() == Compression::Divides::First) {
    averaging_.scaling = scaling_of({.batched_grad_copy = true}, averaging_.communicator->numerics());
  }
  has_hook_ = true;
}

void Reducer::set_all_reduce_hook() {
  std::lock_guard lock(mutex_);
  check_no_hook();
  averaging_.scaling = scaling_of({.batched_grad_copy = true}, averaging_.communicator->numerics());
  has_hook_ = true;
}

void Reducer::check_no_hook() const {
  if (phase_ == Phase::Syncing || phase_ == Phase::Finalizing) {
    throw Error(ErrorKind::InvalidUsage,
                parameters_.model() + ": hooks can't be registered in the middle of a backward");
  }
  if (has_hook_) {
    throw Error(ErrorKind::InvalidUsage, "register_comm_hook or register_builtin_comm_hook can only be called once.");
  }
}

void Reducer::set_static_graph() {
  std::lock_guard lock(mutex_);
  if (averaging_.statistics.backwards > 0 || phase_ == Phase::Syncing) {
    throw Error(ErrorKind::InvalidUsage,
                "set_static_graph() should be called before training loop starts and after DistributedDataParallel is "
                "constructed.");
  }
  if (!static_graph_) static_graph_ = std::make_unique<StaticGraph>(parameters_.size());
}

void Reducer::average_over(double divisor, double weight) {
  std::lock_guard lock(mutex_);
  coming_forward().weighting = {.divisor = divisor, .weight = weight, .given = true};
}

void Reducer::expect_shadows() {
  std::lock_guard lock(mutex_);
  coming_forward().has_shadows = true;
}

void Reducer::install_futures(std::vector<TorchFuture> futures) {
  std::lock_guard lock(mutex_);
  coming_backward().wait_at_end_for(std::move(futures));
}

bool Reducer::has_averaged() const { return delivers_; }

void Reducer::remove_hooks() {
  std::lock_guard lock(mutex_);
  if (phase_ == Phase::Syncing) give_up({removed_text(), true});
  hooks_removed_ = true;
  if (phase_ == Phase::Armed) phase_ = Phase::Local;
  parameters_.unhook(*this);
}

}  // namespace syncengine
