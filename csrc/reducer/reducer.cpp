#include "reducer/reducer.h"

#include <torch/csrc/autograd/graph_task.h>

#include <algorithm>
#include <chrono>
#include <utility>

#include "base/error.h"
#include "reducer/plan.h"

namespace syncengine {

namespace {

std::vector<Gradient> make_gradients(std::vector<at::Tensor> parameters, const std::vector<bool>& sparse) {
  std::vector<Gradient> gradients;
  gradients.reserve(parameters.size());
  for (size_t i = 0; i < parameters.size(); ++i) gradients.emplace_back(std::move(parameters[i]), sparse[i]);
  return gradients;
}

bool inside_backward() { return torch::autograd::get_current_graph_task_id() != -1; }

}  // namespace

Reducer::Reducer(std::vector<at::Tensor> parameters, ModelNames names, std::shared_ptr<Communicator> communicator,
                 const std::vector<bool>& sparse, const ReducerOptions& options, std::unique_ptr<BucketLane> lane)
    : communicator_(std::move(communicator)),
      names_(std::make_shared<const ModelNames>(std::move(names))),
      options_(options),
      scaling_(scaling_of(options, communicator_->numerics())),
      pool_(options.gradients_in_arena ? communicator_->gradient_pool() : nullptr),
      first_slot_(communicator_->reserve_slots(parameters.size() + 1)),
      gradients_(make_gradients(std::move(parameters), sparse)),
      hooks_(gradients_.size()),
      planned_(gradients_.size()),
      bucket_of_(gradients_.size()),
      position_of_(gradients_.size()),
      divisor_(communicator_->size()),
      flat_(lane ? std::make_unique<FlatBuckets>(std::move(lane)) : nullptr),
      reachable_(gradients_.size()),
      used_here_(gradients_.size()),
      used_anywhere_(std::make_shared<std::vector<uint8_t>>(gradients_.size())) {
  for (const Gradient& gradient : gradients_) attributes_.emplace_back(gradient.parameter());
  if (pool_) gradient_memory::install();
  if (options.static_graph) static_graph_ = std::make_unique<StaticGraph>(gradients_.size());
  if (pool_) pool_->join();
}

Reducer::~Reducer() {
  remove_hooks();
  if (pool_) pool_->leave();
}

// --- Forward

bool Reducer::begin_forward(bool synchronize) {
  std::unique_lock lock(mutex_);
  if (recomputing()) return false;
  wait_for_tasks(lock);
  if (phase_ == Phase::Syncing) {
    std::string text = unfinished_text();
    tell_peers(text);
    settle_after_failure();
    throw Error(ErrorKind::InvalidUsage, text);
  }
  communicator_->throw_if_failed();
  if (phase_ == Phase::Consumed && !synchronize) phase_ = Phase::Local;
  if (synchronize) timeline_.begin_forward(statistics_.backwards);
  if (flat_) follow_stream();
  follow_parameters();
  bool wanted_plan = std::exchange(wants_plan_, plan_is_outdated());
  if (wants_plan_ && !wanted_plan && scaling_ == Scaling::DivideViewed) {
    for (Gradient& gradient : gradients_) gradient.keep();  // here DDP makes buckets, and moves them there
  }
  return wants_plan_;
}

// A device's thread of autograd may let go of a failed graph task after backward() has raised.
void Reducer::wait_for_tasks(std::unique_lock<std::mutex>& lock) {
  if (tasks_watched_ == 0 || inside_backward()) return;
  task_ended_.wait_for(lock, std::chrono::seconds(1), [this] { return tasks_watched_ == 0; });
}

bool Reducer::plan_is_outdated() {
  if (std::exchange(hooks_or_plan_changed_, false)) {
    plan_covers_hooks_ = true;
    for (size_t i = 0; i < hooks_.size(); ++i) plan_covers_hooks_ &= (hooks_[i] != nullptr) == planned_[i];
  }
  return !plan_covers_hooks_ || (provisional_ && plan_used_);
}

void Reducer::follow_parameters() {
  constexpr size_t kSoon = 16, kNext = 8;
  for (size_t i = 0; i < attributes_.size(); ++i) {
    if (i + kSoon < attributes_.size()) attributes_[i + kSoon].prefetch_tensor();
    if (i + kNext < attributes_.size()) attributes_[i + kNext].prefetch_autograd();
    if (!attributes_[i].changed()) continue;
    follow(i);
    attributes_[i].changed();  // the reducer's own hooks are no news
  }
}

// A parameter's AccumulateGrad node exists only while it requires a gradient, and changes with its dtype (model.double()).
void Reducer::follow(size_t index) {
  const at::Tensor& parameter = gradients_[index].parameter();
  auto& hook = hooks_[index];
  bool wanted = parameter.requires_grad();
  if (wanted && postpone_user_hooks(weak_from_this(), index, parameter)) any_user_hooks_ = true;
  if (hook && (!wanted || hook->dtype() != parameter.scalar_type())) {
    unhook(index);
    planned_[index] = planned_[index] && !wanted;
  }
  if (wanted && !hook) {
    hook = std::make_unique<GradientHook>(*this, index, parameter);
    accumulators_[hook->node()] = index;
  }
  hooks_or_plan_changed_ = true;
}

void Reducer::unhook(size_t index) {
  accumulators_.erase(hooks_[index]->node());
  hooks_[index].reset();
}

// An AccumulateGrad node runs on the stream that was current when it was made, and a graph can't be captured through one of
// another stream that is the default one. So all are made anew where nobody else holds them.
void Reducer::follow_stream() {
  const c10::Stream stream = flat_->current();
  if (std::exchange(hooked_on_, stream) == stream) return;
  for (size_t i = 0; i < hooks_.size(); ++i) {
    if (!hooks_[i]) continue;
    unhook(i);
    attributes_[i] = Attributes(gradients_[i].parameter());
  }
}

std::vector<at::Tensor> Reducer::prepare_for_backward(const std::vector<at::Tensor>& outputs) {
  std::lock_guard lock(mutex_);
  if (recomputing()) return {};
  std::vector<at::Tensor> strangers;
  if (finds_unused() || observes()) strangers = strangers_behind(outputs);
  if (brought_nothing_) check_parameters_take_part(outputs);
  phase_ = Phase::Armed;
  outputs_hooked_ = false;
  for (const auto& output : outputs) outputs_hooked_ |= hook_output(weak_from_this(), output, &Reducer::on_output);
  return strangers;
}

// Marks what they reach.
std::vector<at::Tensor> Reducer::strangers_behind(const std::vector<at::Tensor>& outputs) {
  if (phase_ != Phase::Armed) reachable_.assign(reachable_.size(), false);
  auto others = mark_used(outputs, accumulators_, reachable_);
  if (others.empty()) return {};
  for (size_t i = 0; i < planned_.size(); ++i) {
    if (planned_[i] && !reachable_[i]) return leaves_of(others);
  }
  return {};
}

// A module whose parameters were replaced would train without ever being synchronized.
void Reducer::check_parameters_take_part(const std::vector<at::Tensor>& outputs) {
  auto requires_grad = [](const at::Tensor& output) { return output.requires_grad(); };
  if (accumulators_.empty() || std::none_of(outputs.begin(), outputs.end(), requires_grad)) return;
  std::vector<bool> reached(gradients_.size());
  mark_used(outputs, accumulators_, reached);
  if (std::find(reached.begin(), reached.end(), true) != reached.end()) return;
  std::string text = "the outputs of " + names_->model +
                     " depend on none of the parameters that it was made with, so nothing would be synchronized. "
                     "Were they replaced, say by load_state_dict(assign=True)? Then wrap the module again";
  tell_peers(text);
  throw Error(ErrorKind::InvalidUsage, text);
}

// Checkpointing runs forward again while the backward that needs it is on its way: nothing begins.
bool Reducer::recomputing() const { return phase_ == Phase::Syncing && inside_backward(); }

void Reducer::prepare_for_local_backward(const std::vector<at::Tensor>& outputs) {
  if (!pool_) return;
  for (const auto& output : outputs) hook_output(weak_from_this(), output, &Reducer::on_local_output);
}

void Reducer::install_plan(const std::vector<std::vector<size_t>>& buckets, bool provisional) {
  std::lock_guard lock(mutex_);
  if (phase_ == Phase::Syncing || phase_ == Phase::Finalizing) {
    throw Error(ErrorKind::InvalidUsage, names_->model + ": the buckets can't change in the middle of a backward");
  }
  buckets_ = make_buckets(buckets, gradients_, names_);
  if (flat_) lay_out_flat_buckets();
  hooks_or_plan_changed_ = true;
  provisional_ = provisional;
  plan_used_ = false;
  planned_.assign(planned_.size(), false);
  gradient_memory::Sizes sizes;
  for (size_t b = 0; b < buckets_.size(); ++b) {
    const auto& parameters = buckets_[b].layout->parameters;
    for (size_t k = 0; k < parameters.size(); ++k) {
      size_t i = parameters[k];
      planned_[i] = true;
      bucket_of_[i] = b;
      position_of_[i] = k;
      const size_t bytes = gradients_[i].parameter().nbytes();
      if (!gradients_[i].sparse() && bytes >= gradient_memory::kSmallest) sizes.insert(bytes);
    }
  }
  flags_fit_ = std::all_of(buckets_.begin(), buckets_.end(),
                           [](const Bucket& bucket) { return bucket.layout->parameters.size() <= 64 * kMaxFlagWords; });
  if (pool_ && (!habits_ || habits_->sizes() != sizes)) {
    habits_ = std::make_shared<gradient_memory::AllocationHabits>(std::move(sizes));
  }
  sparse_.clear();
  for (const auto& bucket : buckets_) {
    if (bucket.layout->sparse) sparse_.push_back(bucket.layout->parameters[0]);
  }
  std::sort(sparse_.begin(), sparse_.end());
  if (comm_hook_) comm_hook_->reset(buckets_.size());
  wants_plan_ = false;
  ready_order_.reserve(gradients_.size());
}

std::vector<size_t> Reducer::ready_order() const {
  std::lock_guard lock(mutex_);
  return ready_order_;
}

Timeline Reducer::timeline() const {
  std::lock_guard lock(mutex_);
  return timeline_;
}

void Reducer::set_sample_rate(uint64_t rate) {
  std::lock_guard lock(mutex_);
  timeline_.set_sample_rate(rate);
}

Statistics Reducer::statistics() const {
  std::lock_guard lock(mutex_);
  return statistics_;
}

void Reducer::check_finalized() const {
  std::lock_guard lock(mutex_);
  if (phase_ == Phase::Syncing) throw Error(ErrorKind::InvalidUsage, unfinished_text());
}

void Reducer::set_comm_hook(std::unique_ptr<CommHook> hook) {
  std::lock_guard lock(mutex_);
  check_no_hook();
  hook->reset(buckets_.size());
  comm_hook_ = std::move(hook);
}

void Reducer::set_compression(Compression compression) {
  std::lock_guard lock(mutex_);
  check_no_hook();
  for (size_t i = 0; i < gradients_.size(); ++i) compression.check(gradients_[i].parameter(), name(i));
  compression_ = compression;
  if (flat_ && !buckets_.empty()) lay_out_flat_buckets();
  if (compression.divides() == Compression::Divides::First) divide_contributions();
}

void Reducer::set_all_reduce_hook() {
  std::lock_guard lock(mutex_);
  check_no_hook();
  all_reduce_hook_ = true;
  divide_contributions();
}

// torch's own hooks divide; see Scaling.
void Reducer::divide_contributions() { scaling_ = scaling_of({.batched_grad_copy = true}, communicator_->numerics()); }

void Reducer::check_no_hook() const {
  if (phase_ == Phase::Syncing || phase_ == Phase::Finalizing) {
    throw Error(ErrorKind::InvalidUsage, names_->model + ": hooks can't be registered in the middle of a backward");
  }
  if (comm_hook_ || compression_ || all_reduce_hook_) {
    throw Error(ErrorKind::InvalidUsage, "register_comm_hook or register_builtin_comm_hook can only be called once.");
  }
}

void Reducer::set_static_graph() {
  std::lock_guard lock(mutex_);
  if (statistics_.backwards > 0 || phase_ == Phase::Syncing) {
    throw Error(ErrorKind::InvalidUsage,
                "set_static_graph() should be called before training loop starts and after DistributedDataParallel is "
                "constructed.");
  }
  if (!static_graph_) static_graph_ = std::make_unique<StaticGraph>(gradients_.size());
}

void Reducer::install_futures(std::vector<TorchFuture> futures) {
  std::lock_guard lock(mutex_);
  for (auto& future : futures) futures_.push_back(std::move(future));
}

bool Reducer::has_averaged() const { return phase_ == Phase::Consumed; }

void Reducer::remove_hooks() {
  std::lock_guard lock(mutex_);
  accumulators_.clear();
  for (size_t i = 0; i < hooks_.size(); ++i) {
    hooks_[i].reset();
    attributes_[i] = Attributes(gradients_[i].parameter());
    restore_user_hooks(gradients_[i].parameter());
  }
}

}  // namespace syncengine
