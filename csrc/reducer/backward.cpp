#include "reducer/backward.h"

#include <torch/csrc/autograd/graph_task.h>

#include <algorithm>
#include <utility>

#include "base/error.h"
#include "reducer/python_error.h"
#include "reducer/sparse.h"

namespace syncengine {

using torch::autograd::Node;

namespace {

// Of the graph task on this thread: all but perhaps the one that it starts from.
bool is_in_this_task(const Node* node) {
  const auto* nodes = torch::autograd::get_current_graph_task_nodes_in_graph();
  return nodes != nullptr && nodes->count(const_cast<Node*>(node)) > 0;
}

bool is_in_this_task(const Forward& forward) {
  return forward.reached || std::any_of(forward.outputs.begin(), forward.outputs.end(),
                                        [](const Node* node) { return is_in_this_task(node); });
}

}  // namespace

void Backward::expect(const std::shared_ptr<Forward>& forward) {
  std::erase_if(forwards_, [](const auto& weak) { return weak.expired(); });
  forwards_.push_back(forward);
  if (forward->outputs.empty()) kept_ = forward;
}

void Backward::wait_at_end_for(std::vector<TorchFuture> futures) {
  for (auto& future : futures) futures_.push_back(std::move(future));
}

void Backward::begin(std::shared_ptr<const BucketPlan> plan, Route& route, bool looks_for_unused, bool asks_usage) {
  plan_ = std::move(plan);
  route_ = &route;
  asks_usage_ = asks_usage;
  usage_travels_ = model_.flat == nullptr && route.outlives_errors() && plan_->sparse().empty() &&
                   !model_.options.skip_all_reduce_unused_params &&
                   Usage::words_of(plan_->largest_bucket()) + kMaskWords <= kMaxFlagWords;
  buckets_.reserve(plan_->buckets().size());
  for (const auto& layout : plan_->buckets()) {
    buckets_.push_back({.layout = layout, .missing = layout->parameters.size()});
  }
  missing_ = buckets_.size();
  weighting_.divisor = model_.averaging.communicator->size();
  take_forwards(looks_for_unused);
}

void Backward::take_forwards(bool looks_for_unused) {
  std::vector<std::shared_ptr<Forward>> alive;
  for (const auto& weak : forwards_) {
    if (auto forward = weak.lock()) alive.push_back(std::move(forward));
  }
  auto same = [&](const auto& forward) { return forward->weighting == alive[0]->weighting; };
  if (alive.size() > 1 && (looks_for_unused || !std::all_of(alive.begin(), alive.end(), same))) {
    // Those that were dropped, though something still holds their graph, are none of this backward's.
    const auto last = alive.back();
    std::erase_if(alive, [](const auto& forward) { return !is_in_this_task(*forward); });
    if (alive.empty()) alive.push_back(last);
  }
  if (looks_for_unused) reachable_.assign(model_.parameters.size(), false);
  for (const auto& forward : alive) {
    has_shadows_ |= forward->has_shadows;
    if (forward->weighting.given) {
      if (weighting_.given && weighting_ != forward->weighting) {
        throw Error(ErrorKind::InvalidUsage,
                    "this backward comes from several forwards of " + model_.parameters.model() +
                        " before which weight() was given different numbers: give it once before the first of them, "
                        "with the number for all");
      }
      weighting_ = forward->weighting;
    }
    for (size_t i = 0; i < forward->reachable.size() && looks_for_unused; ++i) {
      if (forward->reachable[i]) reachable_[i] = true;
    }
  }
  if (!looks_for_unused) return;
  // Or from a loss that is no output.
  for (const auto& [node, index] : model_.parameters.accumulators()) {
    if (!reachable_[index] && is_in_this_task(node)) reachable_[index] = true;
  }
}

bool Backward::reachable(size_t index) const { return reachable_[index]; }

void Backward::collect(size_t index, const at::Tensor& incoming, bool watched) {
  model_.parameters.gradients()[index].collect(incoming, watched, name(index), averaging().statistics);
  note_ready(index);
  count_collected(index);
}

void Backward::note_ready(size_t index) {
  averaging().ready_order.push_back(index);
  averaging().used += (index + 1) * 0x9e3779b97f4a7c15u ^ index;
  averaging().timeline.gradient();
}

void Backward::collect_noted(size_t index) {
  model_.parameters.gradients()[index].collect_noted(name(index), averaging().statistics);
  count_collected(index);
}

void Backward::collect_unused(size_t index) {
  model_.parameters.gradients()[index].collect_unused(averaging().statistics);
  count_collected(index);
}

void Backward::collect_absent() {
  for (size_t i = 0; i < model_.parameters.size(); ++i) {
    if (!plan_->covers(i)) continue;
    model_.parameters.gradients()[i].collect_absent();
    averaging().ready_order.push_back(i);  // as DDP: who was never asked gives the order of registration
    count_collected(i);
  }
}

void Backward::count_collected(size_t index) {
  Bucket& bucket = buckets_[plan_->bucket_of(index)];
  Gradient& gradient = model_.parameters.gradients()[index];
  if (bucket.missing == bucket.layout->parameters.size()) route_->open(*this, bucket);
  if (model_.flat) model_.flat->note(bucket.layout->index);
  if (weighting_.weight != 1.0) gradient.weigh(weighting_.weight);
  if (bucket.memory && bucket.memory->small) {
    const size_t offset = bucket.layout->small.offsets[plan_->position_of(index)];
    if (offset != SmallLayout::kLarge) {
      bucket.memory->small.copy_in(offset, gradient.data(), gradient.memory().nbytes(), averaging().statistics);
    }
  }
  if (--bucket.missing > 0) return;
  --missing_;
  bucket.state = skips(bucket) ? Bucket::State::Skipped : Bucket::State::Ready;
  route_->ready(*this, bucket);
  if (missing_ == 0 && asks_usage_ && !usage_travels_) announce_usage();
}

bool Backward::skips(const Bucket& bucket) const {
  if (!model_.options.skip_all_reduce_unused_params || has_shadows_) return false;
  const auto& parameters = bucket.layout->parameters;
  return std::all_of(parameters.begin(), parameters.end(), [&](size_t i) { return gradients()[i].stands_in(); });
}

void Backward::announce_usage() {
  auto anywhere = model_.usage.share();
  Operation operation;
  operation.dtype = DType::UInt8;
  operation.op = ReduceOp::Max;
  operation.numerics = averaging().communicator->numerics();
  operation.output.add(anywhere->data(), anywhere->size());
  operation.input = operation.output;
  operation.describe = [names = model_.parameters.names()] { return "used parameters of " + names->model; };
  operation.keepalive = anywhere;
  usage_work_ = averaging().communicator->announce(averaging().slots, averaging().usage_slot(), std::move(operation));
}

void Backward::proceed(std::mutex& mutex) { route_->proceed(*this, mutex); }

void Backward::finish() {
  Communicator& communicator = *averaging().communicator;
  if (model_.options.skip_all_reduce_unused_params) check_skipped();
  route_->finish(*this);
  if (abandoned_by_ != 0) return;
  if (usage_work_) communicator.wait(usage_work_, raise_pending_signal);
  if (!route_->takes_sparse() && !plan_->sparse().empty()) average_sparse_gradients();
  for (const TorchFuture& future : std::exchange(futures_, {})) {
    wait_for_future(future, communicator, [this] { return "a buffer hook's future of " + model_.parameters.model(); });
  }
}

void Backward::average_sparse_gradients() {
  std::vector<at::Tensor> gathered;
  for (size_t i : plan_->sparse()) {
    if (model_.flat) model_.flat->take_over(buckets_[plan_->bucket_of(i)], gradients());
    gathered.push_back(gradients()[i].memory());
  }
  averaging().statistics.reduced_bytes +=
      average_sparse(gathered, *averaging().communicator, weighting_.divisor, model_.parameters.model());
}

// Ranks that skip what others reduce would wait for each other forever.
void Backward::check_skipped() const {
  Communicator& communicator = *averaging().communicator;
  if (usage_work_) communicator.wait(usage_work_, raise_pending_signal);
  for (const auto& bucket : buckets_) {
    if (bucket.state != Bucket::State::Skipped) continue;
    for (size_t i : bucket.layout->parameters) {
      if (!model_.usage.anywhere(i)) continue;
      throw Error(ErrorKind::Mismatch,
                  "parameter " + name(i) +
                      " is used on some ranks and not on others, which skip_all_reduce_unused_params=True does not "
                      "allow");
    }
  }
}

std::vector<size_t> Backward::deliver(bool tracks_usage, bool tells_which) {
  std::vector<size_t> written;
  for (Bucket& bucket : buckets_) {
    route_->deliver(*this, bucket);
    for (size_t i : bucket.layout->parameters) {
      Gradient& gradient = model_.parameters.gradients()[i];
      const bool delivered = gradient.deliver(!tracks_usage || model_.usage.anywhere(i));
      if (delivered && tells_which) written.push_back(i);
      if (averaging().scaling == Scaling::DivideViewed) gradient.keep();
    }
  }
  return written;
}

bool Backward::can_be_abandoned() const {
  // Where sparse gradients are gathered afterwards, some bucket has to tell the peers before that.
  const bool gathers = !plan_->sparse().empty();
  return route_->outlives_errors() && !model_.options.skip_all_reduce_unused_params &&
         !model_.options.waits_in_between && std::any_of(buckets_.begin(), buckets_.end(), [&](const Bucket& bucket) {
           return !bucket.layout->sparse && (!gathers || bucket.state != Bucket::State::InFlight);
         });
}

Abandoned Backward::abandon(bool keeps_gradients) {
  is_abandoned_ = true;
  Abandoned left;
  auto& gradients = model_.parameters.gradients();
  for (Bucket& bucket : buckets_) {
    for (size_t i : bucket.layout->parameters) keeps_gradients ? gradients[i].forget() : gradients[i].discard();
    if (bucket.layout->sparse) continue;
    if (bucket.state != Bucket::State::InFlight) {
      left.told = true;
      for (size_t i : bucket.layout->parameters) gradients[i].collect_absent();
      route_->stand_in(*this, bucket);
      for (size_t i : bucket.layout->parameters) gradients[i].forget();
    }
    left.works.push_back(bucket.work);
    left.buckets.push_back(bucket.memory);
  }
  if (asks_usage_ && !usage_travels_ && !usage_work_) announce_usage();
  if (usage_work_) left.works.push_back(usage_work_);
  return left;
}

uint64_t Abandoned::mask(size_t which) const {
  uint64_t members = 0;
  for (const auto& memory : buckets) members |= memory->flags[memory->flags.size() - Backward::kMaskWords + which];
  return members;
}

void Backward::drop(bool keeps_gradients) {
  is_over_ = true;
  auto& gradients = model_.parameters.gradients();
  for (Bucket& bucket : buckets_) {
    for (size_t i : bucket.layout->parameters) keeps_gradients ? gradients[i].forget() : gradients[i].discard();
  }
  if (route_) route_->drop();
}

}  // namespace syncengine
