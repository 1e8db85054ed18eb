#include "reducer/reducer.h"

#include <torch/csrc/autograd/graph_task.h>

#include <algorithm>
#include <utility>

#include "base/error.h"
#include "reducer/plan.h"
#include "reducer/python_error.h"

namespace syncengine {

namespace {

std::vector<Gradient> make_gradients(std::vector<at::Tensor> parameters) {
  std::vector<Gradient> gradients;
  gradients.reserve(parameters.size());
  for (auto& parameter : parameters) gradients.emplace_back(std::move(parameter));
  return gradients;
}

bool inside_backward() { return torch::autograd::get_current_graph_task_id() != -1; }

// True in backward() without `inputs`: it accumulates into every leaf. autograd.grad() and backward(inputs=...) do not.
bool whole_graph_runs() {
  const auto* chosen = torch::autograd::get_current_graph_task_exec_info();
  return chosen == nullptr || chosen->empty();
}

}  // namespace

Reducer::Reducer(std::vector<at::Tensor> parameters, ModelNames names, std::shared_ptr<Communicator> communicator,
                 bool find_unused_parameters, bool gradients_in_arena)
    : communicator_(std::move(communicator)),
      names_(std::make_shared<const ModelNames>(std::move(names))),
      find_unused_parameters_(find_unused_parameters),
      pool_(gradients_in_arena ? communicator_->gradient_pool() : nullptr),
      first_slot_(communicator_->reserve_slots(parameters.size() + 1)),
      gradients_(make_gradients(std::move(parameters))),
      hooks_(gradients_.size()),
      planned_(gradients_.size()),
      bucket_of_(gradients_.size()),
      divisor_(communicator_->size()),
      reachable_(gradients_.size()),
      used_here_(gradients_.size()),
      used_anywhere_(std::make_shared<std::vector<uint8_t>>(gradients_.size())) {
  if (pool_) gradient_memory::install();
}

Reducer::~Reducer() {
  remove_hooks();
  if (pool_) pool_->trim();
}

// --- Forward

bool Reducer::begin_forward(bool synchronize) {
  std::lock_guard lock(mutex_);
  if (recomputing()) return false;
  if (phase_ == Phase::Syncing) {
    std::string text = unfinished_text();
    tell_peers(text);
    settle_after_failure();
    throw Error(ErrorKind::InvalidUsage, text);
  }
  communicator_->throw_if_failed();
  if (phase_ == Phase::Consumed && !synchronize) phase_ = Phase::Local;
  if (synchronize) timeline_.begin_forward(statistics_.backwards);
  follow_requires_grad();
  for (size_t i = 0; i < hooks_.size(); ++i) {
    if ((hooks_[i] != nullptr) != planned_[i]) return true;
  }
  return provisional_ && plan_used_;
}

// A parameter's AccumulateGrad node exists only while it requires a gradient, and changes with its dtype (model.double()).
void Reducer::follow_requires_grad() {
  for (size_t i = 0; i < hooks_.size(); ++i) {
    const at::Tensor& parameter = gradients_[i].parameter();
    bool wanted = parameter.requires_grad();
    if (wanted) postpone_user_hooks(weak_from_this(), i, parameter);
    if (hooks_[i] && (!wanted || hooks_[i]->dtype() != parameter.scalar_type())) {
      accumulators_.erase(hooks_[i]->node());
      hooks_[i].reset();
      planned_[i] = planned_[i] && !wanted;
    }
    if (wanted && !hooks_[i]) {
      hooks_[i] = std::make_unique<GradientHook>(*this, i, parameter);
      accumulators_[hooks_[i]->node()] = i;
    }
  }
}

void Reducer::prepare_for_backward(const std::vector<at::Tensor>& outputs) {
  std::lock_guard lock(mutex_);
  if (recomputing()) return;
  if (find_unused_parameters_) {
    if (phase_ != Phase::Armed) reachable_.assign(reachable_.size(), false);
    mark_used(outputs, accumulators_, reachable_);
  }
  if (brought_nothing_) check_parameters_take_part(outputs);
  phase_ = Phase::Armed;
  outputs_hooked_ = false;
  for (const auto& output : outputs) outputs_hooked_ |= hook_output(weak_from_this(), output, &Reducer::on_output);
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
  provisional_ = provisional;
  plan_used_ = false;
  planned_.assign(planned_.size(), false);
  gradient_memory::Sizes sizes;
  for (size_t b = 0; b < buckets_.size(); ++b) {
    for (size_t i : buckets_[b].layout->parameters) {
      planned_[i] = true;
      bucket_of_[i] = b;
      sizes.insert(gradients_[i].parameter().nbytes());
    }
  }
  pooled_sizes_ = std::make_shared<const gradient_memory::Sizes>(std::move(sizes));
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

void Reducer::remove_hooks() {
  std::lock_guard lock(mutex_);
  accumulators_.clear();
  for (size_t i = 0; i < hooks_.size(); ++i) {
    hooks_[i].reset();
    restore_user_hooks(gradients_[i].parameter());
  }
}

// --- Backward

void Reducer::on_output() {
  std::lock_guard lock(mutex_);
  if (!whole_graph_runs()) return;
  if (phase_ == Phase::Consumed) throw_consumed();
  if (phase_ != Phase::Armed) return;
  pool_gradients();
  // From here on the peers expect us: an error anywhere in this backward must reach them.
  watch_this_backward();
  // If no parameter at all is used here, no other hook will run.
  if (find_unused_parameters_) begin_backward();
}

void Reducer::on_local_output() {
  std::lock_guard lock(mutex_);
  pool_gradients();
}

// From here on this backward's gradients lie where peers reach them.
void Reducer::pool_gradients() {
  if (!pool_ || !pooled_sizes_) return;
  int task = torch::autograd::get_current_graph_task_id();
  if (std::exchange(pooled_task_, task) != task) pool_gradients_of_this_task(*pool_, pooled_sizes_);
}

bool Reducer::postpones(size_t index) const {
  std::lock_guard lock(mutex_);
  return planned_[index] && (phase_ == Phase::Armed || phase_ == Phase::Syncing);
}

void Reducer::on_gradient(size_t index, const at::Tensor& incoming) {
  if (phase_.load(std::memory_order_relaxed) == Phase::Local && !find_unused_parameters_) return;  // set by this thread
  std::lock_guard lock(mutex_);
  if (find_unused_parameters_ && gradients_[index].parameter().grad().defined()) used_here_[index] = true;
  switch (phase_) {
    case Phase::Local: return;
    case Phase::Finalizing: throw_collected_twice(index);
    case Phase::Consumed:
      if (tasks_watched_ > 0) throw_collected_twice(index);
      if (!outputs_hooked_) throw_consumed();  // as far as one can tell
      return;                                  // a backward that is none of ours: on_output has not run
    case Phase::Armed:
      watch_this_backward();
      begin_backward();
      break;
    case Phase::Syncing: watch_this_backward();
  }
  collect(index, incoming);
}

void Reducer::begin_backward() {
  phase_ = Phase::Syncing;
  plan_used_ = true;
  for (auto& bucket : buckets_) {
    bucket.state = Bucket::State::Filling;
    bucket.missing = bucket.layout->parameters.size();
  }
  buckets_missing_ = buckets_.size();
  ready_order_.clear();
  timeline_.begin_backward(statistics_.backwards, gradients_.size());
  statistics_ = Statistics{.backwards = statistics_.backwards + 1, .buckets = buckets_.size()};
  if (!find_unused_parameters_) return;
  for (size_t i = 0; i < planned_.size(); ++i) {
    if (!planned_[i] || reachable_[i]) continue;
    gradients_[i].collect_unused(statistics_);
    count_collected(i);
  }
}

void Reducer::collect(size_t index, const at::Tensor& incoming) {
  Gradient& gradient = gradients_[index];
  if (gradient.collected() || !planned_[index]) throw_collected_twice(index);
  try {
    gradient.collect(incoming, name(index), statistics_);
  } catch (const Error& error) {
    tell_peers(error.what());
    throw;
  }
  ready_order_.push_back(index);
  timeline_.gradient();
  count_collected(index);
}

void Reducer::count_collected(size_t index) {
  Bucket& bucket = buckets_[bucket_of_[index]];
  if (--bucket.missing > 0) return;
  bucket.state = Bucket::State::Ready;
  if (weight_ != 1.0) weigh(bucket);
  announce(bucket);
  if (--buckets_missing_ == 0 && find_unused_parameters_) announce_usage();
}

void Reducer::announce(Bucket& bucket) {
  const BucketLayout& layout = *bucket.layout;
  Operation operation;
  operation.dtype = layout.dtype;
  operation.op = ReduceOp::Avg;
  operation.numerics = communicator_->numerics();
  // DDP scales each contribution as it copies it into the bucket; rank_order scales the sum, and so rounds once.
  double& scale = operation.numerics == Numerics::Ring ? operation.prescale : operation.postscale;
  scale = 1.0 / divisor_;
  bucket.memory = std::make_shared<std::vector<at::Tensor>>();
  bucket.memory->reserve(layout.parameters.size());
  for (size_t i : layout.parameters) bucket.memory->push_back(gradients_[i].memory());
  if (pool_ && operation.prescale == 1.0) bucket.small = SmallGradients::gather(*pool_, *bucket.memory, statistics_);
  for (size_t i = 0; i < bucket.memory->size(); ++i) {
    operation.output.add(bucket.small.place(*bucket.memory, i), (*bucket.memory)[i].nbytes());
  }
  statistics_.reduced_bytes += operation.output.bytes();
  operation.input = operation.output;
  operation.layout_hash = layout.hash;
  operation.describe = [layout = bucket.layout] { return layout->describe(); };
  operation.keepalive = bucket.memory;
  if (bucket.small.memory())
    operation.keepalive =
        std::make_shared<std::pair<std::shared_ptr<void>, std::shared_ptr<void>>>(bucket.memory, bucket.small.memory());
  timeline_.bucket();
  bucket.work = communicator_->announce(first_slot_ + layout.index, std::move(operation));
  bucket.state = Bucket::State::InFlight;
}

void Reducer::announce_usage() {
  for (size_t i = 0; i < used_here_.size(); ++i) (*used_anywhere_)[i] = used_here_[i];
  Operation operation;
  operation.dtype = DType::UInt8;
  operation.op = ReduceOp::Max;
  operation.numerics = communicator_->numerics();
  operation.output.add(used_anywhere_->data(), used_anywhere_->size());
  operation.input = operation.output;
  operation.describe = [names = names_] { return "used parameters of " + names->model; };
  operation.keepalive = used_anywhere_;
  usage_work_ = communicator_->announce(first_slot_ + gradients_.size(), std::move(operation));
}

// --- Backward's end
//
// Callbacks run at the end of the graph task they were queued in. Reentrant checkpointing nests tasks, and an inner one may
// end before later hooks run or bring the last gradient itself. So each task that we see gets a callback, and the first to
// find all buckets announced finalizes. That may be an inner task: nothing written here is read by an outer one.

void Reducer::watch_this_backward() {
  int task = torch::autograd::get_current_graph_task_id();
  if (std::exchange(watched_task_, task) == task) return;
  queue_backward_end(shared_from_this());
  ++tasks_watched_;
}

void Reducer::on_backward_end() {
  {
    std::lock_guard lock(mutex_);
    --tasks_watched_;
    brought_nothing_ = phase_ == Phase::Armed;
    if (phase_ != Phase::Syncing || buckets_missing_ > 0) return;
    phase_ = Phase::Finalizing;
  }
  finalize();
  for (const auto& bucket : buckets_) {
    for (size_t i : bucket.layout->parameters) run_postponed(gradients_[i].parameter());
  }
}

void Reducer::finalize() {
  try {
    wait_for_buckets();
  } catch (...) {
    std::lock_guard lock(mutex_);
    settle_after_failure();
    throw;
  }
  {
    std::lock_guard lock(mutex_);
    for (auto& bucket : buckets_) deliver(bucket);
    used_here_.assign(used_here_.size(), false);
    timeline_.end();
    divisor_ = communicator_->size();
    weight_ = 1.0;
    phase_ = Phase::Consumed;
  }
}

void Reducer::wait_for_buckets() {
  for (const auto& bucket : buckets_) communicator_->wait(bucket.work, raise_pending_signal);
  if (find_unused_parameters_) communicator_->wait(usage_work_, raise_pending_signal);
}

void Reducer::deliver(Bucket& bucket) {
  bucket.small.scatter(*bucket.memory);
  for (size_t i : bucket.layout->parameters) {
    gradients_[i].deliver(!find_unused_parameters_ || (*used_anywhere_)[i] != 0);
  }
  bucket.state = Bucket::State::Reduced;
  bucket.work.reset();
  bucket.memory->clear();  // the engine may hold the operation a little longer
  bucket.memory.reset();
  bucket.small = {};
}

void Reducer::on_backward_abandoned() noexcept {
  try {
    std::lock_guard lock(mutex_);
    --tasks_watched_;
    if (phase_ != Phase::Armed && phase_ != Phase::Syncing) return;
    tell_peers("backward aborted");
    settle_after_failure();
  } catch (...) {
    // In a destructor, on the way of the error that ended this backward.
  }
}

void Reducer::settle_after_failure() {
  for (auto& bucket : buckets_) {
    if (bucket.work && bucket.work->state() == Work::State::Done && !find_unused_parameters_) {
      deliver(bucket);
      continue;
    }
    for (size_t i : bucket.layout->parameters) gradients_[i].discard();
    bucket.work.reset();
    bucket.memory.reset();  // not cleared: the engine keeps what it might still touch
    bucket.small = {};
  }
  phase_ = Phase::Consumed;
}

// --- Texts

// They wait for gradients that this rank will not bring.
void Reducer::tell_peers(const std::string& text) const {
  auto rank = communicator_->global_ranks()[communicator_->rank()];
  communicator_->abort(ErrorKind::Aborted, "rank " + std::to_string(rank) + ": " + text);
}

std::string Reducer::unfinished_text() const {
  std::string indices, missing;
  size_t next = 0;  // DDP counts only parameters that require a gradient
  for (size_t i = 0; i < gradients_.size(); ++i) {
    size_t index = next;
    if (!planned_[i] || (++next, gradients_[i].collected())) continue;
    indices += " " + std::to_string(index);
    missing += (missing.empty() ? "" : ", ") + name(i);
  }
  auto rank = std::to_string(communicator_->global_ranks()[communicator_->rank()]);
  return "Expected to have finished reduction in the prior iteration before starting a new one. This error indicates "
         "that "
         "your module has parameters that were not used in producing loss. You can enable unused parameter detection "
         "by "
         "passing the keyword argument `find_unused_parameters=True` to `syncengine.Parallel`, and by making sure all "
         "`forward` function outputs participate in calculating loss.\nParameter indices which did not receive grad "
         "for "
         "rank " +
         rank + ":" + indices + "\nParameters which did not receive grad for rank " + rank + ": " + missing;
}

void Reducer::throw_collected_twice(size_t index) const {
  std::string text = "Expected to mark a variable ready only once. Parameter " + std::to_string(index) + " (" +
                     name(index) + ") of " + names_->model +
                     " got another gradient when its average was already on its way: it is used " +
                     "outside of the module's forward, or in several reentrant checkpoints (use_reentrant=False helps)";
  tell_peers(text);
  throw Error(ErrorKind::InvalidUsage, text);
}

void Reducer::throw_consumed() const {
  throw Error(
      ErrorKind::InvalidUsage,
      "this backward runs through a forward of " + names_->model + " that an earlier backward has already " +
          "synchronized, so its gradients would differ between ranks. Run one backward over the sum of the losses, "
          "or the earlier forwards and backwards under no_sync()");
}

}  // namespace syncengine
